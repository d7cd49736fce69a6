// A recording as the panels need it: the whole text at every frame, though a frame may hold one block of it.

export class Story {
  constructor(words, spaced) {
    this.words = words;
    this.spaced = spaced;
    this.known = new Map(); // position -> token of the words that were given
    this.frames = [];
    this.states = [];
    this.end = null;
  }

  static of(recording, index) {
    const sample = recording.samples[index];
    const story = new Story(recording.words, recording.spaced);
    story.give((sample.known ?? []).map((position) => [position, sample.tokens[position]]));
    for (const frame of sample.frames) story.push(frame);
    story.finish(sample);
    return story;
  }

  give(pairs) {
    for (const [position, token] of pairs) this.known.set(position, token);
  }

  push(frame) {
    // A frame overlays what was there; positions before it keep what they had.
    const before = this.states.at(-1);
    const size = Math.max(before?.tokens.length ?? 0, frame.start + frame.tokens.length);
    const state = { tokens: new Array(size), weight: new Array(size), changed: new Array(size).fill(false),
      leaders: new Array(size), nearest: new Array(size), second: new Array(size), entropy: new Array(size) };
    for (let p = 0; p < size; p++) {
      const i = p - frame.start;
      const inside = i >= 0 && i < frame.tokens.length;
      if (!inside) {
        for (const name of ["tokens", "weight", "leaders", "nearest", "second", "entropy"])
          state[name][p] = before?.[name][p] ?? null;
        if (state.tokens[p] === null && this.known.has(p)) [state.tokens[p], state.weight[p]] = [this.known.get(p), 1];
        continue;
      }
      state.tokens[p] = frame.tokens[i];
      state.leaders[p] = frame.top_tokens
        ? frame.top_tokens[i].map((token, k) => [token, frame.top_weights[i][k]])
        : null;
      state.weight[p] = frame.top_weights ? frame.top_weights[i][0] : null;
      for (const name of ["nearest", "second", "entropy"]) state[name][p] = frame[name] ? frame[name][i] : null;
      state.changed[p] = before ? before.tokens[p] !== frame.tokens[i] : false;
    }
    this.frames.push(frame);
    this.states.push(state);
  }

  finish(end) {
    // Some solvers go on after the last network call: then what was read off is a state of its own.
    this.end = end;
    const last = this.states.at(-1);
    if (!last || end.tokens.every((token, p) => token === last.tokens[p])) return;
    const moved = end.tokens.map((token, p) => token !== last.tokens[p]);
    const unless = (values) => end.tokens.map((_, p) => (moved[p] ? null : values[p] ?? null));
    this.frames.push({ ...this.frames.at(-1), agreement: {} });
    this.states.push({ ...last, tokens: [...end.tokens], changed: moved, weight: unless(last.weight), leaders: unless(last.leaders) });
  }

  get length() {
    return this.frames.length;
  }

  word(token) {
    return this.words[token] ?? "\u2591";
  }

  parted(position, token) {
    // Whether a space stands before the token.
    const word = this.word(token);
    return position > 0 && (this.spaced ? !/^[.,;:!?)]$/.test(word) : word.startsWith(" "));
  }

  get latest() {
    // The position that stays undecided longest: the most telling one to look at.
    const doubt = (this.states.at(-1)?.tokens ?? []).map((_, p) =>
      this.known.has(p) ? -1 : this.states.reduce((sum, state) => sum + 1 - (state.weight[p] ?? 1), 0));
    return Math.max(0, doubt.indexOf(Math.max(...doubt)));
  }

  path(position) {
    // The weights of a position's three strongest tokens along the flow; what is beyond the fifth counts as rest.
    const best = new Map();
    const leaders = this.states.map((state) => state.leaders[position]).filter(Boolean);
    for (const each of leaders) for (const [token, weight] of each) best.set(token, Math.max(best.get(token) ?? 0, weight));
    const last = this.states.at(-1)?.tokens[position];
    const others = [...best.entries()].filter(([token]) => token !== last).sort((a, b) => b[1] - a[1]);
    const corners = [last, ...others.slice(0, 2).map(([token]) => token)].filter((token) => token !== undefined && token !== null);
    const points = this.states.map((state) => {
      const each = state.leaders[position];
      if (!each) return null;
      const found = new Map(each);
      return corners.map((token) => found.get(token) ?? 0);
    });
    return { corners, points };
  }
}
