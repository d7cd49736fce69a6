// Normalised distances to the nearest and second-nearest embedding over log-SNR: where they part, words are decided.
import { el, svg } from "./dom.js";

const HEIGHT = 240, LEFT = 44, RIGHT = 16, ABOVE = 12, BOTTOM = 36;

export class DistancesPanel {
  constructor(title = "") {
    this.picture = svg("svg", { height: HEIGHT, class: "chart", role: "img", "aria-label": `${title || "Distances"}: nothing to show yet.` });
    new ResizeObserver(() => this.asked && this.show(...this.asked)).observe(this.picture); // in pixels, as the frontier
    this.title = title;
    this.node = el("div", {}, this.picture,
      el("div", { class: "legend" }, el("span", { class: "key nearest" }, "nearest"), el("span", { class: "key second" }, "second nearest"), el("span", { class: "quiet" }, "bands: 1st to 99th percentile of positions")));
  }

  show(story, index, position = null, top = null) {
    this.asked = [story, index, position, top];
    const { width } = this.picture.getBoundingClientRect();
    const frames = story.frames.filter((frame) => frame.block === story.frames[Math.min(index, story.length - 1)].block);
    this.picture.replaceChildren();
    if (!frames.length || !frames[0].nearest) {
      this.picture.append(svg("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "no embeddings to measure from"));
      this.picture.setAttribute("aria-label", "No distances.");
      return;
    }
    const rows = frames.map((frame) => ({ x: frame.log_snr, nearest: band(frame.nearest), second: band(frame.second) }));
    const [x0, x1] = [Math.min(...rows.map((row) => row.x)), Math.max(...rows.map((row) => row.x))];
    const low = Math.min(0.8, ...rows.map((row) => row.nearest[0])) * 0.97;
    const high = top ?? Math.max(1.4, ...rows.map((row) => row.second[2])) * 1.1;
    const X = (value) => LEFT + ((value - x0) / (x1 - x0 || 1)) * (width - LEFT - RIGHT);
    const Y = (value) => HEIGHT - BOTTOM - (Math.log(Math.max(value, low) / low) / Math.log(high / low)) * (HEIGHT - ABOVE - BOTTOM);
    for (const tick of [0.5, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3, 5, 7, 10, 20, 50].filter((tick) => tick >= low && tick <= high))
      this.picture.append(
        svg("line", { x1: LEFT, x2: width - RIGHT, y1: Y(tick), y2: Y(tick), class: tick === 1 ? "one" : "grid" }),
        svg("text", { x: LEFT - 6, y: Y(tick) + 4, "text-anchor": "end" }, tick),
      );
    for (const part of [0, 0.25, 0.5, 0.75, 1]) {
      const value = x0 + part * (x1 - x0);
      this.picture.append(svg("text", { x: X(value), y: HEIGHT - BOTTOM + 16, "text-anchor": "middle" }, value.toFixed(1)));
    }
    this.picture.append(svg("text", { x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 4, "text-anchor": "middle", class: "quiet" }, "log-SNR of the state"));
    for (const name of ["second", "nearest"]) {
      const there = rows.map((row) => `${X(row.x)},${Y(row[name][2])}`);
      const back = rows.map((row) => `${X(row.x)},${Y(row[name][0])}`).reverse();
      this.picture.append(
        svg("polygon", { points: [...there, ...back].join(" "), class: `band ${name}` }),
        svg("polyline", { points: rows.map((row) => `${X(row.x)},${Y(row[name][1])}`).join(" "), class: `line ${name}` }),
      );
      if (position !== null && position - frames[0].start >= 0 && position - frames[0].start < frames[0].tokens.length)
        this.picture.append(svg("polyline", { class: `own ${name}`,
          points: frames.map((frame) => [frame.log_snr, frame[name][position - frame.start]]).filter(([, y]) => y !== null).map(([x, y]) => `${X(x)},${Y(y)}`).join(" ") }));
    }
    const now = story.frames[Math.min(index, story.length - 1)];
    this.picture.append(svg("line", { x1: X(now.log_snr), x2: X(now.log_snr), y1: ABOVE, y2: HEIGHT - BOTTOM, class: "cursor" }));
    const end = rows.at(-1);
    this.picture.setAttribute("aria-label",
      `${this.title} Normalised distances. At the last step the nearest embedding is at ${end.nearest[1].toFixed(2)}, the second nearest at ${end.second[1].toFixed(2)}.`);
  }
}

function band(values) {
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b);
  if (!sorted.length) return [1, 1, 1];
  const at = (share) => sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
  return [at(0.01), at(0.5), at(0.99)];
}
