// The exact triangle: mu is a weighted mean, so a position's weights are its coordinates.
import { el, svg } from "./dom.js";

const CORNERS = [[150, 26], [24, 226], [276, 226]];
const CENTRE = [0, 1].map((axis) => (CORNERS[0][axis] + CORNERS[1][axis] + CORNERS[2][axis]) / 3);

export class TrianglePanel {
  constructor() {
    this.picture = svg("svg", { viewBox: "0 0 300 262", class: "triangle", role: "img", "aria-label": "The triangle: nothing to show yet." });
    this.words = el("p", { class: "reading", "aria-live": "off" });
    this.node = el("div", { class: "centred" }, this.picture, this.words);
  }

  show(story, index, position) {
    const { corners, points } = story.path(position);
    this.picture.replaceChildren(
      svg("polygon", { points: CORNERS.map((corner) => corner.join(",")).join(" "), class: "field" }),
      svg("circle", { cx: CENTRE[0], cy: CENTRE[1], r: 2.5, class: "centre" }),
    );
    if (!points[index] || corners.length === 0) {
      this.words.textContent = "There are no weights to draw here.";
      this.picture.setAttribute("aria-label", "No weights at this position.");
      return;
    }
    corners.forEach((token, k) => {
      const [x, y] = CORNERS[k];
      this.picture.append(svg("text", { x, y: y + (k === 0 ? -10 : 20), "text-anchor": ["middle", "start", "end"][k], class: k ? "corner" : "corner final" },
        story.word(token)));
    });
    const places = points.map((weights) => (weights ? located(weights) : null));
    const past = places.slice(0, index + 1).filter(Boolean);
    this.picture.append(
      svg("polyline", { points: places.filter(Boolean).map((p) => p.join(",")).join(" "), class: "path ahead" }),
      svg("polyline", { points: past.map((p) => p.join(",")).join(" "), class: "path" }),
      ...past.map(([x, y]) => svg("circle", { cx: x, cy: y, r: 1.8, class: "step" })),
      svg("circle", { cx: places[index][0], cy: places[index][1], r: 6, class: "now" }),
    );
    const rest = Math.max(0, 1 - points[index].reduce((sum, weight) => sum + weight, 0));
    const said = corners.map((token, k) => `${story.word(token)} ${points[index][k].toFixed(3)}`);
    this.words.textContent = `Position ${position + 1}: ${said.join(", ")}, all others ${rest.toFixed(3)}`;
    this.picture.setAttribute("aria-label", this.words.textContent);
  }
}

function located(weights) {
  const rest = 1 - weights.reduce((sum, weight) => sum + weight, 0);
  return [0, 1].map((axis) => weights.reduce((sum, weight, k) => sum + weight * CORNERS[k][axis], rest * CENTRE[axis]));
}
