// A replay: one file with everything in it, played from disk.
import { el } from "./dom.js";
import { Story } from "./story.js";
import { Viewer } from "./viewer.js";

const recording = JSON.parse(document.getElementById("recording").textContent);
if (recording.format !== 1) throw new Error("this replay has another format");
const viewer = new Viewer();
const room = document.getElementById("viewer");
const choice = el("select", { id: "sample", onchange: () => open(Number(choice.value)) });
recording.samples.forEach((sample, number) => choice.append(el("option", { value: number }, `seed ${sample.seed}`)));
const end = el("blockquote", { id: "final" });
viewer.below.append(el("p", { class: "quiet" }, "The end of the flow, read off as text:"), end);
room.append(el("label", { class: "inline" }, "Sample ", choice), viewer.node);
document.getElementById("about").textContent = recording.about ?? "";

function open(number) {
  end.textContent = recording.samples[number].text;
  const story = Story.of(recording, number);
  viewer.load(story);
  viewer.choose(story.latest);
}

open(0);
viewer.opening();
