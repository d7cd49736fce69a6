// A race on one budget: the flow, an autoregressive model and a masked one, side by side.
import { streamed } from "./api.js";
import { el, panel } from "./dom.js";

const RUNNERS = { convergeflow: "Flow: all words at once", ar: "Autoregressive: one word after the other", mdlm: "Masked: words uncovered in any order" };

export class RacePanel {
  constructor(models, words, controls) {
    this.words = words;
    this.controls = controls;
    this.runners = Object.entries(RUNNERS).map(([method, title]) => ({
      method, title, text: el("div", { class: "text small", "aria-live": "off" }), status: el("output", { class: "reading" }),
      model: method === "convergeflow" ? null : models.find((each) => each.convergeflow.method === method) }));
    const missing = this.runners.filter((runner) => runner.method !== "convergeflow" && !runner.model).map((runner) => runner.method);
    this.button = el("button", { type: "button", id: "run-race", onclick: () => this.run() }, "Start the race");
    this.results = el("div", { hidden: true },
      el("div", { class: "lanes three" }, ...this.runners.map((runner) => el("div", { class: "lane" }, el("h3", {}, runner.title), runner.text, runner.status))),
      el("p", { class: "why" }, "Times are those of this server with all of them running at once."));
    this.node = panel("race", "A race on one budget",
      "The same number of network calls for all, as far as a model can choose: the autoregressive one needs a call for every word.",
      el("div", { class: "actions" }, this.button),
      missing.length ? el("p", {}, `This server has no model of the kind ${missing.join(", ")}: start it with one to see it run.`) : null,
      this.results);
  }

  async run() {
    this.button.disabled = true;
    this.results.hidden = false;
    const body = this.controls.body();
    const calls = body.convergeflow.nfe ?? 64;
    await Promise.all(this.runners.map((runner) => {
      if (runner.method === "convergeflow") return this.follow(runner, body);
      if (runner.model) return this.follow(runner, { model: runner.model.id, seed: body.seed, convergeflow: runner.method === "ar" ? {} : { nfe: calls } });
      return runner.status.textContent = "not on this server";
    }));
    this.button.disabled = false;
  }

  async follow(runner, body) {
    const began = performance.now();
    const seconds = () => `${((performance.now() - began) / 1000).toFixed(1)} s`;
    try {
      const { words, spaced } = await this.words(body.model);
      let whole = [];
      const show = (tokens) => (runner.text.textContent = tokens.map((token) => words[token] ?? "\u2591").join(spaced ? " " : ""));
      for await (const chunk of streamed({ ...body, convergeflow: { ...body.convergeflow, frames: true } })) {
        const own = chunk.choices[0]?.convergeflow;
        if (own?.frame) {
          whole = [...whole.slice(0, own.frame.start), ...own.frame.tokens];
          show(whole);
          runner.status.textContent = `${own.calls} calls, ${seconds()}`;
        } else if (own) {
          runner.text.textContent = own.text;
          runner.status.textContent = `done: ${own.calls} calls, ${seconds()}`;
        }
      }
    } catch (failure) {
      runner.status.textContent = failure.message;
    }
  }
}
