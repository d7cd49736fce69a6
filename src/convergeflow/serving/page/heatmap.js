// Position x step: how sure every position is at every step. A click goes to that step and position.
import { colour, el } from "./dom.js";

const QUANTITIES = {
  weight: { label: "largest weight", of: (state, p) => state.weight[p] },
  nearest: { label: "distance to the nearest embedding", of: (state, p) => scaled(state.nearest[p], 0.4, 1.6) },
  margin: { label: "second nearest over nearest", of: (state, p) => scaled(state.second[p] / state.nearest[p], 1, 3) },
  entropy: { label: "certainty (low entropy)", of: (state, p) => (state.entropy[p] === null ? null : Math.exp(-state.entropy[p])) },
};

function scaled(value, low, high) {
  return Number.isFinite(value) ? Math.max(0, Math.min(1, (value - low) / (high - low))) : null;
}

export class HeatmapPanel {
  constructor(onpick) {
    this.canvas = el("canvas", { class: "heatmap", role: "img", "aria-label": "The heatmap: nothing to show yet.", width: 10, height: 10 });
    this.choice = el("select", { "aria-label": "What the heatmap shows", onchange: () => this.draw() });
    for (const [name, { label }] of Object.entries(QUANTITIES)) this.choice.append(el("option", { value: name }, label));
    this.node = el("div", {}, el("label", { class: "inline" }, "Shows ", this.choice), this.canvas,
      el("div", { class: "axis" }, el("span", {}, "first word"), el("span", {}, "noise above, text below"), el("span", {}, "last word")));
    this.canvas.addEventListener("click", (event) => {
      if (!this.story) return;
      const box = this.canvas.getBoundingClientRect();
      const step = Math.floor(((event.clientY - box.top) / box.height) * this.rows);
      const position = Math.floor(((event.clientX - box.left) / box.width) * this.columns);
      onpick(Math.max(0, Math.min(step, this.story.length - 1)), position);
    });
  }

  show(story, index, position) {
    this.story = story;
    this.index = index;
    this.position = position;
    this.draw();
  }

  draw() {
    if (!this.story || this.story.length === 0) return;
    const { of, label } = QUANTITIES[this.choice.value];
    const states = this.story.states;
    this.columns = states.at(-1).tokens.length;
    this.rows = Math.max(states.length, Math.min(this.story.frames.at(-1).steps, 400));
    const cell = 8;
    this.canvas.width = this.columns * cell;
    this.canvas.height = this.rows * cell;
    const pen = this.canvas.getContext("2d");
    const [low, high] = [rgb(colour("--heat-low")), rgb(colour("--heat-high"))];
    pen.fillStyle = colour("--field");
    pen.fillRect(0, 0, this.canvas.width, this.canvas.height);
    states.forEach((state, step) => {
      for (let p = 0; p < this.columns; p++) {
        const value = p < state.tokens.length ? of(state, p) : null;
        if (value === null || value === undefined || Number.isNaN(value)) continue;
        pen.fillStyle = `rgb(${low.map((from, k) => Math.round(from + (high[k] - from) * value)).join(",")})`;
        pen.fillRect(p * cell, step * cell, cell, cell);
      }
    });
    pen.strokeStyle = colour("--second");
    pen.lineWidth = 2;
    pen.strokeRect(1, this.index * cell + 1, this.canvas.width - 2, cell - 2);
    pen.strokeRect(this.position * cell + 1, 1, cell - 2, this.canvas.height - 2);
    const state = states[this.index];
    const values = state.weight.filter((weight) => weight !== null);
    const sure = values.filter((weight) => weight > 0.99).length;
    this.canvas.setAttribute("aria-label", `Heatmap of ${label}: at step ${this.index + 1} of ${states.length}, ${sure} of ${values.length} positions have a weight above 0.99.`);
  }
}

function rgb(hex) {
  return [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));
}
