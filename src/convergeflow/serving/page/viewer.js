// The panels of one flow together: text, triangle, heatmap, distances, with one step and one position for all.
import { el, panel } from "./dom.js";
import { DistancesPanel } from "./distances.js";
import { HeatmapPanel } from "./heatmap.js";
import { Player } from "./player.js";
import { TextPanel } from "./text.js";
import { TrianglePanel } from "./triangle.js";

export class Viewer {
  constructor(onposition = () => {}) {
    this.index = 0;
    this.position = 0;
    this.onposition = onposition;
    this.text = new TextPanel((position) => this.choose(position));
    this.triangle = new TrianglePanel();
    this.heatmap = new HeatmapPanel((step, position) => { this.player.stop(); this.choose(position); this.go(step); });
    this.distances = new DistancesPanel();
    this.player = new Player((step) => this.go(step));
    this.below = el("div", { class: "below" });
    this.node = el("div", { class: "viewer" },
      panel("text", "Text crystallising",
        "The fainter a word, the smaller the largest weight at its position; words that changed in this step are marked. Point at a word, or reach it with Tab and the arrow keys, to see its five leading candidates.",
        this.text.node, this.player.node, this.below),
      panel("triangle", "The exact triangle",
        "The prediction at a position is a weighted mean of word embeddings, so its weights are its coordinates: three corners are the strongest words, the dot in the middle is all others. Choose a word above and watch its path run into a corner.",
        this.triangle.node),
      panel("heatmap", "Every position at every step",
        "Each row is a step and each column a position; the stronger the colour, the more the word is decided. Choose a cell to go there.",
        this.heatmap.node),
      panel("distances", "Nearest and second nearest",
        "Distances of the noisy state to the two nearest word embeddings, in units of the noise. In the noise they are alike; once the word is decided the nearest stays at about 1 and the second nearest runs away.",
        this.distances.node),
    );
    this.node.addEventListener("keydown", (event) => this.keys(event));
  }

  load(story) {
    this.story = story;
    this.index = Math.max(0, story.length - 1);
    this.position = Math.min(this.position, Math.max(0, (story.states.at(-1)?.tokens.length ?? 1) - 1));
    this.draw();
  }

  push(frame) {
    // A live frame: go along if the reader is at the end.
    const following = this.index >= this.story.length - 1;
    this.story.push(frame);
    if (following) this.index = this.story.length - 1;
    this.ask();
  }

  ask() {
    // At most one drawing per screen refresh, however fast frames come.
    if (this.asked) return;
    this.asked = requestAnimationFrame(() => { this.asked = null; this.draw(); });
  }

  go(step) {
    this.index = Math.max(0, Math.min(step, this.story.length - 1));
    this.draw();
  }

  opening() {
    // Play the first text once, unless its reader is elsewhere in it by now or wants no motion.
    if (!this.story?.end || this.index < this.story.length - 1 || matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    this.go(0);
    this.player.play();
  }

  choose(position) {
    this.position = position;
    this.text.selected = position;
    this.onposition(position);
    this.draw();
  }

  keys(event) {
    if (event.target.matches("input, select, textarea") || !this.story) return;
    const step = { "[": -1, "]": 1 }[event.key];
    if (step) { this.player.stop(); this.go(this.index + step); }
  }

  draw() {
    const { story, index, position } = this;
    if (!story || story.length === 0) return;
    this.text.show(story, index);
    this.triangle.show(story, index, position);
    this.heatmap.show(story, index, position);
    this.distances.show(story, index, position);
    this.player.show(story, index);
  }
}
