// Save a run as a file that plays from disk, or share it as a link with all its settings.
import { el, panel } from "./dom.js";

export class KeepPanel {
  constructor(recording) {
    this.status = el("output", { class: "reading" });
    this.save = el("button", { type: "button", id: "save", disabled: true, onclick: () => this.download(recording()) }, "Save as a replay");
    this.share = el("button", { type: "button", id: "share", class: "plain", onclick: () => this.copy() }, "Copy the link");
    this.link = el("input", { type: "text", readonly: true, "aria-label": "A link to these settings", onfocus: () => this.link.select() });
    this.node = panel("keep", "Save and share",
      "A replay is one HTML file with the whole run in it; it needs no server and no network. The link holds every setting, so whoever opens it on the same models sees the same text.",
      el("div", { class: "actions" }, this.save, this.share), this.link, this.status);
  }

  async download(recording) {
    const page = await (await fetch("/page/replay.html")).text();
    const data = JSON.stringify(recording).replaceAll("<", "\\u003c").replaceAll("\u2028", "\\u2028").replaceAll("\u2029", "\\u2029");
    const title = recording.model.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
    const [before, after] = page.replace("{{title}}", () => title).split("{{recording}}");
    const name = `${recording.model.replace(/[^\w.-]/g, "_")}-seed-${recording.samples[0].seed}.html`;
    const address = URL.createObjectURL(new Blob([before, data, after], { type: "text/html" }));
    el("a", { href: address, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
    this.status.textContent = `saved ${name}`;
  }

  point() {
    // The link follows the settings.
    this.link.value = location.href;
  }

  async copy() {
    this.point();
    try {
      await navigator.clipboard.writeText(location.href);
      this.status.textContent = "the link is in the clipboard";
    } catch {
      this.link.select();
      this.status.textContent = "the link is selected: copy it";
    }
  }
}
