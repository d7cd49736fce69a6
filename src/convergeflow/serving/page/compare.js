// Weighted against direct: the same network, table, data and noise; only the output differs.
import { streamed } from "./api.js";
import { DistancesPanel } from "./distances.js";
import { el, panel } from "./dom.js";
import { Story } from "./story.js";

function studyGrid() {
  // Midpoints in time to log-SNR 2, then evenly on to log-SNR 6, where the two predictors part (linear schedule).
  const time = (level) => 1 / (1 + Math.exp(-level / 2));
  const early = Array.from({ length: 24 }, (_, i) => ((i + 0.5) / 24) * time(2));
  return early.concat(Array.from({ length: 24 }, (_, i) => time(2 + ((i + 1) / 24) * 4)));
}

export const PAIR = ["stories-weighted", "stories-direct"]; // they ship for this panel alone
const TOP = 3; // what parts the two happens near 1; the second nearest of both runs far beyond

export class ComparePanel {
  constructor(models, words, seed) {
    this.pair = PAIR.map((id) => models.find((each) => each.id === id));
    this.words = words;
    this.seed = seed;
    this.button = el("button", { type: "button", id: "run-compare", onclick: () => this.run() }, "Run both on this seed");
    this.status = el("output", { class: "reading" });
    this.lanes = ["Embedding-weighted predictor", "Direct predictor"].map((title) => ({
      chart: new DistancesPanel(title), text: el("blockquote", {}), node: null, title }));
    for (const lane of this.lanes) lane.node = el("div", { class: "lane" }, el("h3", {}, lane.title), lane.chart.node, lane.text);
    const missing = this.pair.every(Boolean) ? null
      : el("p", {}, `This server has no pair of such models: start it with ${PAIR.join(" and ")}.`);
    this.results = el("div", { hidden: true }, el("div", { class: "lanes two" }, ...this.lanes.map((lane) => lane.node)),
      el("p", { class: "why" }, "All words of the weighted one stay at the distance that noise has, about 1, so each arrives; some of the direct one drift away from every embedding."));
    this.node = panel("compare", "Weighted against direct",
      "Two models of the convergence study start from the same noise: one may only answer with weighted means of embeddings, the other answers with any vector.",
      missing ?? el("div", { class: "actions" }, this.button, this.status), this.results);
  }

  async run() {
    this.button.disabled = true;
    this.status.textContent = "running both";
    try {
      const ends = await Promise.all(this.pair.map((model, k) => this.follow(model.id, this.lanes[k])));
      const farthest = ends.map((story) => Math.max(...story.states.at(-1).nearest));
      this.status.textContent = `farthest word from its embedding at the end: weighted ${farthest[0].toFixed(2)}, direct ${farthest[1].toFixed(2)} (pure noise stays below about 1.2)`;
    } catch (failure) {
      this.status.textContent = failure.message;
    } finally {
      this.button.disabled = false;
    }
  }

  async follow(model, lane) {
    const grid = studyGrid();
    const { words, spaced } = await this.words(model);
    const story = new Story(words, spaced);
    const own = { frames: true, self_condition: "previous", grid, nfe: grid.length, decode: "prediction" };
    for await (const chunk of streamed({ model, seed: this.seed(), convergeflow: own })) {
      const choice = chunk.choices[0];
      if (choice?.convergeflow.frame) {
        story.push(choice.convergeflow.frame);
        lane.chart.show(story, story.length - 1, null, TOP);
        this.results.hidden = false;
      }
      else if (choice) lane.text.textContent = choice.convergeflow.text;
    }
    return story;
  }
}
