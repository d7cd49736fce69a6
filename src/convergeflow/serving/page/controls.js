// Every control of the sampler, what it costs, and all of it in the address, so that a link shares a run.
import { PAIR } from "./compare.js";
import { el, panel } from "./dom.js";

const NUMBERS = {
  nfe: { min: 1, max: 2048, step: 1 },
  refine: { min: 0, max: 512, step: 1 },
  scg: { min: 0, max: 100, step: "any" },
  ug: { min: 0, max: 10, step: "any" },
  temperature: { min: 0.05, max: 5, step: "any" },
};
const PLAIN = {
  model: ["Model", "It writes the text."],
  prompt: ["Starts with", "It may stay empty."],
  seed: ["Seed", "It draws the noise."],
  nfe: ["Network calls", "More make finer steps."],
};
const EXPERT = {
  preset: ["Preset", "Settings under one name, for every field that you leave empty."],
  refine: ["Refinements", "How often each step is predicted again with the last prediction as a hint (K in the paper)."],
  scg: ["Self-conditioning guidance", "How strongly a prediction follows that hint: 1 is plain, 0 is not at all (w_scg in the paper)."],
  ug: ["Unconditional guidance", "How much farther each step goes than predicted: 0 is no farther (w_ug in the paper)."],
  schedule: ["Strength over time", "Whether refinements and guidance are as strong in the noise as at the end (A) or weaker there (B, C)."],
  temperature: ["Temperature", "Below 1 the text has fewer errors and less variety."],
  grid: ["Grid", "Where in time the steps lie; closing goes on until every word is decided."],
};
export const weighted = (each) => each.convergeflow.flow && each.convergeflow.predictor !== "direct"; // the other has no weights to show
const FIRST = { model: "stories-small", preset: "config-b", nfe: "128", grid: "closing", seed: "11" };

export class Controls {
  constructor(models, onrun, onstop, onchange) {
    this.models = models;
    this.onchange = onchange;
    this.pins = new Map();
    const offers = (list) => list.filter(weighted).map((each) => el("option", { value: each.id }, each.id));
    const compared = offers(models.filter((each) => PAIR.includes(each.id)));
    this.fields = {
      model: el("select", { name: "model" }, ...offers(models.filter((each) => !PAIR.includes(each.id))),
        compared.length ? el("optgroup", { label: "For the comparison below, writes no stories" }, ...compared) : null),
      preset: el("select", { name: "preset" }),
      schedule: el("select", { name: "schedule" }, ...[["", "preset's"], ["A", "A, constant"], ["B", "B, milder in noise"], ["C", "C, weak in noise"]].map(([value, text]) => el("option", { value }, text))),
      grid: el("select", { name: "grid" }, ...["", "closing", "midpoint", "log-snr", "langflow"].map((name) => el("option", { value: name }, name || "preset's"))),
      seed: el("input", { type: "number", name: "seed", min: 0, max: Number.MAX_SAFE_INTEGER, step: 1 }),
      prompt: el("input", { type: "text", name: "prompt", maxlength: 2000 }),
    };
    for (const [name, limits] of Object.entries(NUMBERS))
      this.fields[name] = el("input", { type: "number", name, ...limits, placeholder: "preset's" });
    const described = (words) => el("div", { class: "controls" }, ...Object.entries(words).map(([name, [title, why]]) => {
      this.fields[name].setAttribute("aria-describedby", `why-${name}`);
      return el("div", { class: `field ${name}` }, el("label", {}, title, this.fields[name]), el("small", { id: `why-${name}` }, why));
    }));
    this.run = el("button", { type: "submit", id: "run" }, "Generate");
    this.stop = el("button", { type: "button", class: "plain", id: "stop", disabled: true, onclick: onstop }, "Stop");
    this.cost = el("output", { class: "reading", id: "cost" });
    this.more = el("details", {}, el("summary", {}, "More controls"),
      el("p", { class: "why" }, "Every control of the paper; an empty field takes the preset's value. The same seed is the same noise, so changing one control shows what that control does."), described(EXPERT));
    this.form = el("form", {}, described(PLAIN), el("div", { class: "actions" }, this.run, this.stop, this.cost), this.more);
    this.form.addEventListener("submit", (event) => { event.preventDefault(); onrun(); });
    this.form.addEventListener("input", () => this.changed());
    this.form.addEventListener("invalid", () => (this.more.open = true), true); // a folded field cannot show what is wrong with it
    this.fields.model.addEventListener("change", () => {
      this.pins.clear();
      for (const name of ["nfe", "grid"]) this.fields[name].value = ""; // with its own preset a model is as its makers meant it
      this.offer();
    });
    this.node = panel("controls", "Controls", null, this.form);
    this.read();
  }

  get about() {
    return this.models.find((each) => each.id === this.fields.model.value).convergeflow;
  }

  offer() {
    this.fields.preset.replaceChildren(el("option", { value: "" }, this.about.preset ? `model's own (${this.about.preset})` : "none"),
      ...this.about.presets.map((name) => el("option", { value: name }, name)));
    this.changed();
  }

  read() {
    // From the address; without one, a setting that shows something.
    const given = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
    const here = (values) => this.models.some((each) => each.id === values.model && weighted(each));
    const values = Object.keys(given).length ? given : here(FIRST) ? FIRST : { seed: FIRST.seed };
    if (here(values)) this.fields.model.value = values.model;
    this.offer();
    this.pins.clear();
    for (const [name, field] of Object.entries(this.fields)) if (name !== "model") field.value = values[name] ?? "";
    const usual = values.model === FIRST.model ? FIRST : {}; // nothing that a visitor would have to be shown
    if (Object.keys(EXPERT).some((name) => values[name] && values[name] !== usual[name])) this.more.open = true;
    for (const pair of (values.pins ?? "").split(",").filter(Boolean)) {
      const [position, token] = pair.split(":").map(Number);
      if (Number.isInteger(position) && Number.isInteger(token)) this.pins.set(position, token);
    }
    this.changed();
  }

  changed() {
    const values = Object.entries(this.fields).map(([name, field]) => [name, field.value]).filter(([, value]) => value !== "");
    if (this.pins.size) values.push(["pins", [...this.pins].map((pair) => pair.join(":")).join(",")]);
    history.replaceState(null, "", `#${new URLSearchParams(values)}`);
    this.onchange();
  }

  body() {
    // The request that these controls stand for.
    const own = {};
    for (const name of ["preset", "schedule", "grid"]) if (this.fields[name].value) own[name] = this.fields[name].value;
    for (const name of Object.keys(NUMBERS)) if (this.fields[name].value !== "") own[name] = Number(this.fields[name].value);
    if (this.pins.size) own.pins = [...this.pins].map(([position, token]) => ({ position, token }));
    const body = { model: this.fields.model.value, seed: Number(this.fields.seed.value || 0), convergeflow: own };
    if (this.fields.prompt.value) body.prompt = this.fields.prompt.value;
    return body;
  }

  busy(running) {
    this.run.disabled = running;
    this.stop.disabled = !running;
  }

  say(cost) {
    this.cost.textContent = cost;
  }
}
