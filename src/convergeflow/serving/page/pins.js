// Pin a word, or put another in its place, and run the same noise again.
import { el } from "./dom.js";

export class Pins {
  constructor(controls, rerun) {
    this.controls = controls;
    this.list = el("datalist", { id: "vocabulary" });
    this.word = el("input", { type: "text", id: "pin-word", list: "vocabulary", maxlength: 60, autocomplete: "off", "aria-label": "Word for the chosen position" });
    this.pin = el("button", { type: "button", id: "pin", class: "plain", onclick: () => this.put() }, "Pin");
    this.clear = el("button", { type: "button", id: "unpin", class: "plain", onclick: () => this.drop() }, "Remove all pins");
    this.again = el("button", { type: "button", id: "again", onclick: rerun }, "Run the same noise again");
    this.where = el("span", { class: "reading", id: "pin-where" }, "choose a word above");
    this.status = el("output", { class: "reading", id: "pin-status" });
    this.node = el("div", { class: "pins" }, this.where, this.word, this.pin, this.clear, this.again, this.status);
  }

  vocabulary({ words }) {
    this.words = words;
    this.ids = new Map(Object.entries(words).map(([token, word]) => [word, Number(token)]));
    this.list.replaceChildren(...(this.ids.size <= 1000 ? [...this.ids.keys()].map((word) => el("option", { value: word })) : []));
    if (!this.list.isConnected) this.node.append(this.list);
    this.say();
  }

  choose(position, token) {
    this.position = position;
    this.where.textContent = `word ${position + 1}:`;
    this.word.value = this.words?.[token] ?? "";
  }

  put() {
    const given = this.word.value;
    const token = this.ids?.get(given) ?? this.ids?.get(given.trim().toLowerCase()) ?? this.ids?.get(` ${given.trim()}`);
    if (this.position === undefined || token === undefined) {
      this.status.textContent = this.position === undefined ? "choose a word first" : `${given} is no word of this model`;
      return;
    }
    this.controls.pins.set(this.position, token);
    this.controls.changed();
    this.say();
  }

  drop() {
    this.controls.pins.clear();
    this.controls.changed();
    this.say();
  }

  say() {
    const shown = [...this.controls.pins].map(([position, token]) => `${position + 1}: ${this.words?.[token] ?? token}`);
    this.status.textContent = shown.length ? `pinned ${shown.join(", ")}` : "";
  }
}
