// Quality against variety of saved records, and where the present setting stands among them.
import { el, panel, svg } from "./dom.js";

const SIZE = { height: 320, left: 52, right: 16, top: 14, bottom: 42 };

export class FrontierPanel {
  constructor(data) {
    this.data = data;
    this.picture = svg("svg", { height: SIZE.height, class: "chart", role: "img", "aria-label": "The frontier: nothing to show yet." });
    new ResizeObserver(() => this.asked && this.show(...this.asked)).observe(this.picture); // in pixels: a stretched picture has tiny labels on a phone
    this.words = el("p", { class: "reading" });
    this.key = el("div", { class: "legend" });
    this.node = panel("frontier", "Quality against variety",
      "Every point is a saved evaluation: the lower its generative perplexity the fewer surprises, the higher its entropy the more varied the words. The ring marks the record of the present setting, and the cross is real text.",
      this.picture, this.key, this.words);
  }

  show(model, settings) {
    this.asked = [model, settings];
    const { width } = this.picture.getBoundingClientRect();
    const corpus = ["sotu", "basic"].find((name) => model.includes(name)) || "stories";
    const { points, real } = this.data[corpus];
    const good = points.filter((point) => Number.isFinite(point.gen_ppl) && Number.isFinite(point.entropy));
    const ys = good.map((point) => point.gen_ppl).concat(real ? [real.gen_ppl] : []);
    const xs = good.map((point) => point.entropy).concat(real ? [real.entropy] : []).sort((a, b) => a - b);
    const [x0, x1] = [xs[Math.floor(0.03 * xs.length)] - 0.02, xs.at(-1) + 0.02];
    const [y0, y1] = [Math.min(...ys) * 0.9, Math.max(...ys) * 1.1];
    const X = (value) => SIZE.left + ((Math.max(value, x0) - x0) / (x1 - x0)) * (width - SIZE.left - SIZE.right);
    const Y = (value) => SIZE.height - SIZE.bottom - (Math.log(value / y0) / Math.log(y1 / y0)) * (SIZE.height - SIZE.top - SIZE.bottom);
    this.picture.replaceChildren();
    for (const tick of [1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000].filter((tick) => tick > y0 && tick < y1))
      this.picture.append(svg("line", { x1: SIZE.left, x2: width - SIZE.right, y1: Y(tick), y2: Y(tick), class: "grid" }),
        svg("text", { x: SIZE.left - 6, y: Y(tick) + 4, "text-anchor": "end" }, tick));
    for (const part of [0, 0.25, 0.5, 0.75, 1])
      this.picture.append(svg("text", { x: X(x0 + part * (x1 - x0)), y: SIZE.height - SIZE.bottom + 16, "text-anchor": "middle" }, (x0 + part * (x1 - x0)).toFixed(2)));
    this.picture.append(svg("text", { x: width / 2, y: SIZE.height - 6, "text-anchor": "middle" }, "entropy of the words (nats)"),
      svg("text", { x: 12, y: SIZE.height / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${SIZE.height / 2})` }, "Gen. PPL"));
    const kinds = { ours: "shipped models", flow: "ConvergeFlow, equal budgets", ar: "autoregressive", other: "other diffusion systems" };
    const kind = (point) => point.shipped ? "ours" : point.curve === "convergeflow" ? "flow" : point.curve === "ar" ? "ar" : "other";
    for (const point of [...good].sort((a, b) => a.shipped - b.shipped))
      this.picture.append(svg("circle", { cx: X(point.entropy), cy: Y(point.gen_ppl), r: point.shipped ? 5 : 3.5, class: `dot ${kind(point)}` },
        svg("title", {}, `${point.curve}: Gen. PPL ${point.gen_ppl}, entropy ${point.entropy}, ${point.nfe} calls, n = ${point.n}`)));
    if (real) this.picture.append(svg("path", { class: "real", d: `M${X(real.entropy) - 6} ${Y(real.gen_ppl) - 6}l12 12m0 -12l-12 12` }));
    this.key.replaceChildren(...Object.entries(kinds).map(([name, text]) => el("span", { class: `spot ${name}` }, text)), el("span", {}, "\u00d7 real text"));
    const own = good.filter((point) => settings && point.curve === model && point.temperature === (settings.temperature ?? 1)
      && point.base_temperature === (settings.base_temperature ?? 1));
    const match = own.find((point) => point.nfe === settings.nfe
      && Object.entries(point.controls).every(([name, value]) => close(settings.controls[name], value)));
    const near = match ?? own.find((point) => close(settings.controls.scg, point.controls.scg) && close(settings.controls.refine, point.controls.refine));
    if (near) this.picture.append(svg("circle", { cx: X(near.entropy), cy: Y(near.gen_ppl), r: 11, class: "ring" }));
    this.words.textContent = match
      ? `This setting was measured: Gen. PPL ${match.gen_ppl} at entropy ${match.entropy} over ${match.n} samples (${match.record}).`
      : near ? `This guidance was measured with ${near.nfe} calls: Gen. PPL ${near.gen_ppl} at entropy ${near.entropy} (${near.record}).`
        : "There is no record of this setting.";
    this.picture.setAttribute("aria-label", `Gen. PPL against entropy of ${good.length} saved records. ${this.words.textContent}`);
  }
}

function close(a, b) {
  return typeof a === "number" ? Math.abs(a - b) <= 0.002 * Math.abs(b) + 1e-9 : a === b;
}
