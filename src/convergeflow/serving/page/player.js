// The scrubber: one step after the other, by button, slider or keys.
import { el } from "./dom.js";

export class Player {
  constructor(onstep) {
    this.onstep = onstep;
    this.button = el("button", { type: "button", class: "play", onclick: () => (this.timer ? this.stop() : this.play()) }, "Play");
    this.slider = el("input", { type: "range", min: 0, max: 0, value: 0, id: "scrubber", "aria-label": "Step of the flow",
      oninput: () => { this.stop(); this.onstep(Number(this.slider.value)); } });
    this.reading = el("output", { class: "reading", for: "scrubber" });
    this.node = el("div", { class: "player" }, this.button, this.slider, this.reading);
  }

  show(story, index) {
    this.slider.max = Math.max(0, story.length - 1);
    this.slider.value = index;
    const frame = story.frames[index];
    if (!frame) return;
    const level = frame.log_snr === null ? "" : `, log-SNR ${frame.log_snr.toFixed(2)}`;
    const agreement = frame.agreement?.["weight=distance"];
    const rules = agreement === undefined ? "" : `, rules agree on ${(100 * agreement).toFixed(0)} %`;
    const block = frame.block ? `, block ${frame.block + 1}` : "";
    this.reading.textContent = `step ${index + 1} of ${story.length}${block}, ${frame.calls} calls${level}${rules}`;
    this.slider.setAttribute("aria-valuetext", this.reading.textContent);
  }

  play() {
    const last = Number(this.slider.max);
    let at = Number(this.slider.value) >= last ? -1 : Number(this.slider.value);
    const pause = Math.max(40, Math.min(400, 4000 / (last + 1)));
    this.button.textContent = "Pause";
    this.timer = setInterval(() => {
      at += 1;
      this.onstep(at);
      if (at >= last) this.stop();
    }, pause);
  }

  stop() {
    clearInterval(this.timer);
    this.timer = null;
    this.button.textContent = "Play";
  }
}
