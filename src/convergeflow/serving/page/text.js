// Text crystallising: opacity is the largest weight, colour says what changed in this step.
import { el } from "./dom.js";

export class TextPanel {
  constructor(onselect) {
    this.onselect = onselect;
    this.tip = el("div", { class: "tip", role: "status", "aria-live": "polite", hidden: true });
    this.box = el("div", { class: "text", role: "group", "aria-label": "The text at this step. Arrow keys move between words." });
    this.node = el("div", { class: "text-frame" }, this.box, this.tip);
    this.buttons = [];
    this.selected = 0;
    this.box.addEventListener("keydown", (event) => this.keys(event));
    this.box.addEventListener("mouseleave", () => (this.tip.hidden = true));
  }

  show(story, index) {
    const state = story.states[index];
    if (!state) return;
    this.story = story;
    this.state = state;
    while (this.buttons.length < state.tokens.length) this.add(this.buttons.length);
    while (this.buttons.length > state.tokens.length) {
      const button = this.buttons.pop();
      button.previousSibling.remove();
      button.remove();
    }
    state.tokens.forEach((token, position) => {
      const button = this.buttons[position];
      const weight = state.weight[position];
      const word = token === null || token === undefined ? "\u2591" : story.word(token);
      // The space before a word is text of its own: a line that begins with the word has none.
      const gap = story.parted(position, token) ? " " : "";
      if (button.previousSibling.data !== gap) button.previousSibling.data = gap;
      const bare = word.replace(/^ (?=.)/, "");
      if (button.textContent !== bare) button.textContent = bare;
      button.style.opacity = weight === null ? 1 : 0.22 + 0.78 * weight;
      button.classList.toggle("changed", state.changed[position]);
      button.classList.toggle("sure", weight !== null && weight > 0.99);
      button.classList.toggle("known", story.known.has(position));
      button.classList.toggle("selected", position === this.selected);
      button.tabIndex = position === this.selected ? 0 : -1;
      const sure = weight === null ? "" : `, weight ${weight.toFixed(2)}`;
      button.setAttribute("aria-label", `${word}, position ${position + 1}${sure}`);
      button.setAttribute("aria-pressed", position === this.selected ? "true" : "false");
    });
    if (!this.tip.hidden) this.explain(this.told);
  }

  add(position) {
    const button = el("button", {
      type: "button", class: "token",
      onclick: () => this.select(position),
      onmouseenter: () => this.explain(position),
      onfocus: () => this.explain(position),
      onblur: () => (this.tip.hidden = true),
    });
    this.buttons.push(button);
    this.box.append("", button);
  }

  select(position, quiet = false) {
    this.selected = Math.max(0, Math.min(position, this.buttons.length - 1));
    if (this.story) this.show(this.story, this.story.states.indexOf(this.state));
    if (!quiet) this.onselect(this.selected);
  }

  keys(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -8, ArrowDown: 8 }[event.key];
    if (!move) return;
    event.preventDefault();
    event.stopPropagation();
    this.select(this.selected + move);
    this.buttons[this.selected].focus();
  }

  explain(position) {
    // The five leading tokens of a position, beside it.
    const leaders = this.state?.leaders[position];
    this.told = position;
    this.tip.replaceChildren();
    if (!leaders) {
      this.tip.hidden = true;
      return;
    }
    for (const [token, weight] of leaders)
      this.tip.append(
        el("div", { class: "leader" },
          el("span", { class: "name" }, this.story.word(token)),
          el("meter", { min: 0, max: 1, value: weight, "aria-hidden": "true" }),
          el("span", { class: "value" }, weight.toFixed(3)),
        ),
      );
    this.tip.hidden = false;
    const frame = this.node.getBoundingClientRect();
    const place = this.buttons[position].getBoundingClientRect();
    const left = Math.min(Math.max(0, place.left - frame.left), Math.max(0, frame.width - this.tip.offsetWidth));
    this.tip.style.left = `${left}px`;
    this.tip.style.top = `${place.bottom - frame.top + 6}px`;
  }
}
