// The live page: asks the server, shows what comes, and puts the panels together.
import { Refused, ask, streamed } from "./api.js";
import { ComparePanel } from "./compare.js";
import { Controls, weighted } from "./controls.js";
import { el } from "./dom.js";
import { FrontierPanel } from "./frontier.js";
import { KeepPanel } from "./keep.js";
import { Pins } from "./pins.js";
import { RacePanel } from "./race.js";
import { Story } from "./story.js";
import { Viewer } from "./viewer.js";

const alertBox = document.getElementById("asked");
const vocabularies = new Map();
let running = null;
let latest = null;

function wordsOf(model) {
  if (!vocabularies.has(model)) vocabularies.set(model, ask(`/page/words/${encodeURIComponent(model)}`));
  return vocabularies.get(model);
}

function complain(failure) {
  alertBox.replaceChildren();
  if (!failure || failure.name === "AbortError") return;
  alertBox.append(el("p", { class: "complaint" }, failure.message));
  if (failure instanceof Refused && failure.status === 401) {
    const token = el("input", { type: "password", "aria-label": "Token", autocomplete: "off" });
    alertBox.append(el("form", { class: "actions", onsubmit: (event) => { event.preventDefault(); sessionStorage.setItem("token", token.value); location.reload(); } }, token, el("button", { type: "submit" }, "Use this token")));
  }
}

async function begin() {
  const [{ data: models }, records] = await Promise.all([ask("/v1/models"), ask("/page/frontier.json")]);
  if (!models.some(weighted)) throw new Error("This server has no flow to show: start it with one, for example stories-small. Its models answer at /v1/completions.");
  const frontier = new FrontierPanel(records);
  const viewer = new Viewer((position) => pins.choose(position, viewer.story?.states.at(-1)?.tokens[position]));
  const end = el("blockquote", { id: "final" });
  const done = el("p", { class: "reading", id: "done" });
  let planned = null;

  async function price() {
    // What the present controls would cost; only the latest question counts.
    planned?.abort();
    const own = (planned = new AbortController());
    try {
      const plan = await ask("/plan", controls.body(), own.signal);
      const time = plan.seconds === null ? "" : `, about ${plan.seconds.toFixed(1)} s`;
      controls.say(`${plan.calls} calls in ${plan.steps} steps${time}`);
      frontier.show(controls.body().model, plan.settings);
    } catch (failure) {
      if (failure.name !== "AbortError") controls.say(failure.message);
    }
  }

  async function run() {
    running?.abort();
    const own = (running = new AbortController());
    const body = controls.body();
    controls.busy(true);
    complain(null);
    done.textContent = "";
    viewer.player.stop();
    try {
      const vocabulary = await wordsOf(body.model);
      pins.vocabulary(vocabulary);
      const story = new Story(vocabulary.words, vocabulary.spaced);
      viewer.load(story);
      latest = { body, story, vocabulary };
      for await (const chunk of streamed({ ...body, convergeflow: { ...body.convergeflow, frames: true } }, own.signal)) {
        const choice = chunk.choices[0];
        if (choice?.convergeflow.known) story.give(choice.convergeflow.known);
        if (choice?.convergeflow.frame) viewer.push(choice.convergeflow.frame);
        else if (choice) {
          const following = viewer.index >= story.length - 1;
          story.finish(choice.convergeflow);
          if (following) viewer.index = story.length - 1;
          end.textContent = choice.convergeflow.text;
          done.textContent = `${choice.convergeflow.calls} network calls, ${choice.convergeflow.seconds.toFixed(2)} s, seed ${choice.convergeflow.seed}`;
          keep.save.disabled = false;
          viewer.choose(viewer.position || story.latest);
          viewer.ask();
        }
      }
      price();
    } catch (failure) {
      complain(failure);
    } finally {
      if (running === own) controls.busy(false);
    }
  }

  function recording() {
    const { body, story, vocabulary } = latest;
    const used = new Set(story.end.tokens);
    for (const frame of story.frames) {
      for (const token of frame.tokens) used.add(token);
      for (const leaders of frame.top_tokens ?? []) for (const token of leaders) used.add(token);
    }
    const words = Object.fromEntries([...used].map((token) => [token, vocabulary.words[token] ?? "\u2591"]));
    const { seed, calls, tokens, text } = story.end;
    return { format: 1, model: body.model, about: `${body.model}, ${JSON.stringify(body.convergeflow)}`, words, spaced: vocabulary.spaced,
      samples: [{ seed, calls, tokens, text, known: [...story.known.keys()], frames: story.frames }] };
  }

  let later = null;
  const controls = new Controls(models, run, () => running?.abort(), () => { clearTimeout(later); later = setTimeout(() => { keep.point(); price(); }, 200); });
  const pins = new Pins(controls, run);
  const keep = new KeepPanel(recording);
  const seed = () => controls.body().seed;
  viewer.below.append(pins.node, el("p", { class: "quiet" }, "The end of the flow, read off as text:"), end, done);
  document.getElementById("controls-place").append(controls.node);
  document.getElementById("viewer-place").append(viewer.node);
  document.getElementById("more").append(
    new ComparePanel(models, wordsOf, seed).node, frontier.node, keep.node, new RacePanel(models, wordsOf, controls).node);
  window.addEventListener("hashchange", () => controls.read());
  await run();
  viewer.opening();
}

begin().catch(complain);
