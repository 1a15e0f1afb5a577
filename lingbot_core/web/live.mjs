// A live world to walk through, as one element for any page: picture, keys, pads, map, and everything that can be said.
//
//   import { createLive } from "./live.mjs";
//   const live = createLive({ address: "ws://127.0.0.1:8761/v1/live" });
//   document.body.append(live.element);
//
// It knows nothing of the page around it.

import { KEYS, Input, watchDrag, watchGamepads, watchKeyboard, watchPad } from "./live_input.mjs";
import { Link } from "./live_link.mjs";
import { WalkedMap } from "./live_map.mjs";
import { Picture } from "./live_picture.mjs";
import { texts } from "./live_texts.mjs";

const MIB = 2 ** 20;

/** `element("div", "name", {attributes}, ...children)`; classes get the prefix of this module. */
function make(tag, name = "", attributes = {}, ...children) {
  const made = document.createElement(tag);
  made.className = name
    .split(" ")
    .filter(Boolean)
    .map((part) => `lbw-${part}`)
    .join(" ");
  for (const [key, value] of Object.entries(attributes)) {
    if (key in made && typeof value !== "string") made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

/** The style sheet, once in each document. */
function useStyles() {
  const href = new URL("./live.css", import.meta.url).href;
  if (document.querySelector(`link[href="${href}"]`)) return;
  document.head.append(make("link", "", { rel: "stylesheet", href }));
}

/**
 * address: of the socket. language: "en" or "zh". `changed(status)` hears how the world is. Returns {element, dispose, link, input}.
 */
export function createLive({ address, language = "en", changed = () => {} }) {
  useStyles();
  const say = texts(language);
  const view = build(say);
  const { root, stage, parts } = view;
  const picture = new Picture(parts.canvas);
  const map = new WalkedMap(parts.map);
  picture.onlatency = (milliseconds) => root.dispatchEvent(new CustomEvent("lbw-latency", { detail: milliseconds }));
  let status = { state: "connecting" };
  let controls = 0;
  let dropped = 0;

  const drives = () => link.role === "drive";
  const input = new Input(
    (fields, repeated) => {
      if (!drives()) return;
      controls += 1;
      if (link.send("control", { ...fields, seq: controls }) && !repeated) picture.asked(controls);
    },
    () => view.keys(input.held),
  );

  const link = new Link(address, { heard, frame, changed: connected });

  function frame(header, bytes) {
    if (header.type !== "frame") return;
    picture.show(header, bytes).then(
      (drawn) => drawn && root.setAttribute("data-frame", header.frame),
      () => {}, // a picture that cannot be read is followed by others
    );
  }

  function heard(message) {
    switch (message.type) {
      case "hello":
        controls = 0;
        picture.forget();
        if (message.fresh || message.path.length) map.set(message.path);
        stage.style.aspectRatio = `${message.width} / ${message.height}`;
        view.role(message.role, message.reason);
        view.offer(message.again && link.record.length ? link.record.length : 0);
        tellVisible();
        break;
      case "waiting":
      case "closed":
        status = { state: "closed" };
        link.role = "watch";
        view.role("none", message.type === "closed" ? message.reason : "");
        view.status(status, picture, dropped, drives());
        break;
      case "role":
        controls = 0;
        view.role(message.role, message.reason);
        break;
      case "free":
        view.role(link.role === "drive" ? "drive" : "free", "");
        break;
      case "status":
        status = message;
        dropped = message.dropped ?? dropped;
        view.settings(message);
        view.status(message, picture, dropped, drives());
        changed(message);
        break;
      case "chunk":
        map.add(message.path);
        break;
      case "rewound":
        map.cut(message.latents);
        break;
      case "error":
        if (message.seq == null && message.code !== "not_driving") view.problem(message.message);
        break;
    }
  }

  function connected(state) {
    view.connection(state);
    if (state === "lost") {
      status = { state };
      input.release();
    }
  }

  async function ask(type, fields) {
    const answer = await link.ask(type, fields);
    view.problem(answer.type === "error" ? answer.message : "");
    return answer;
  }

  const goes = () => ["running", "waiting", "replaying"].includes(status.state);
  const toggle = () => drives() && ask(goes() ? "pause" : "start");
  const tellVisible = () => link.send("visible", { visible: !document.hidden });
  const enabled = drives;

  const on = {
    toggle,
    step: () => ask("step"),
    rewind: () => ask("rewind"),
    restart: () => ask("restart"),
    stop: () => ask("stop"),
    snapshot: async () => {
      const answer = await ask("snapshot");
      if (answer.type === "done") view.note(say.snapped(answer.chunks));
    },
    prompt: (prompt) => ask("prompt", { prompt }),
    set: (fields) => drives() && link.send("settings", fields),
    claim: async () => {
      const answer = await ask("claim", { force: true });
      if (answer.type === "done") stage.focus();
    },
    again: async () => {
      view.offer(0);
      await ask("replay", { record: link.record.text() });
    },
  };
  view.connect(on);

  const endings = [
    watchKeyboard(root, input, { leave: () => document.activeElement?.blur(), toggle, enabled }),
    watchGamepads(input, { enabled: () => drives() && document.hasFocus() }),
    () => document.removeEventListener("visibilitychange", tellVisible),
    () => clearInterval(timer),
  ];
  document.addEventListener("visibilitychange", tellVisible);
  watchDrag(stage, input, { enabled });
  watchPad(parts.movePad, input, (x, y) => [y, x, 0, 0, 0], { enabled });
  watchPad(parts.lookPad, input, (x, y) => [0, 0, 0, y, x], { enabled });
  for (const button of parts.upDown.children) {
    const key = button.dataset.key;
    button.addEventListener("pointerdown", () => enabled() && input.down(key, `button ${key}`));
    for (const end of ["pointerup", "pointercancel", "pointerleave"]) {
      button.addEventListener(end, () => input.up(`button ${key}`));
    }
  }
  stage.addEventListener("pointerdown", () => stage.focus());
  const timer = setInterval(() => view.status(status, picture, dropped, drives()), 500);
  map.draw();

  return {
    element: root,
    link,
    input,
    dispose() {
      input.dispose();
      endings.forEach((end) => end());
      link.close();
      root.remove();
    },
  };
}

/** All that is seen, and how it changes. */
function build(say) {
  const canvas = make("canvas", "picture", { width: 160, height: 96 });
  const map = make("canvas", "map", { width: 132, height: 132, role: "img", "aria-label": say.map });
  const chips = make("div", "keys", { "aria-hidden": "true" }, ...KEYS.map((key) => make("kbd", "", { "data-key": key }, key.toUpperCase())));
  const hint = make("div", "hint", {}, say.hint);
  const stage = make("div", "stage", { tabindex: "0", role: "application", "aria-label": say.stage, "data-capture-wheel": "true" }, canvas, map, chips, hint);
  const button = (name, label, title) => make("button", name, { type: "button", title }, label);
  const claim = button("claim", say.claim, say.claimTitle);
  const again = button("again", say.again, say.againTitle);
  const role = make("span", "role-text");
  const offer = make("div", "offer", { hidden: true }, make("span"), again);
  const watching = make("div", "watching", { hidden: true }, role, claim);
  const problem = make("div", "problem", { role: "alert", hidden: true });
  const note = make("div", "note", { role: "status", hidden: true });

  const toggle = button("toggle", say.start, say.toggleTitle);
  const step = button("step", say.step, say.stepTitle);
  const rewind = button("rewind", say.rewind, say.rewindTitle);
  const restart = button("restart", say.restart, say.restartTitle);
  const snapshot = button("snapshot", say.snapshot, say.snapshotTitle);
  const stop = button("stop", say.stop, say.stopTitle);
  const buttons = make("div", "buttons", {}, toggle, step, rewind, restart, snapshot, stop);

  const prompt = make("textarea", "prompt", { rows: 2, maxLength: 20000, placeholder: say.promptPlaceholder, "aria-label": say.prompt });
  const apply = button("apply", say.apply, say.applyTitle);
  const slider = (label) => make("input", "", { type: "range", min: "0.1", max: "2", step: "0.1", value: "1", "aria-label": label });
  const [move, turn] = [slider(say.move), slider(say.turn)];
  const keep = make("input", "", { type: "checkbox" });
  const shown = (slide) => make("output", "", {}, slide.value);
  const [moveShown, turnShown] = [shown(move), shown(turn)];
  const settings = make(
    "div", "settings", {},
    make("label", "", {}, say.move, move, moveShown),
    make("label", "", {}, say.turn, turn, turnShown),
    make("label", "check", { title: say.keepTitle }, keep, say.keep),
  );
  const pad = (name, label) => make("div", `pad ${name}`, { role: "group", "aria-label": label }, make("span"), make("small", "", {}, label));
  const [movePad, lookPad] = [pad("move", say.moveWord), pad("look", say.lookWord)];
  const upDown = make("div", "updown", {}, ...["e", "q"].map((key) => make("button", "", { type: "button", "data-key": key, title: key === "e" ? say.up : say.down }, key === "e" ? "▲" : "▼")));
  const pads = make("div", "pads", {}, movePad, upDown, lookPad);
  const facts = Object.fromEntries(["state", "chunk", "fps", "latency", "buffer", "memory"].map((name) => [name, make("span", `fact ${name}`)]));
  const slow = make("div", "slow", { hidden: true });
  const line = make("div", "facts", { role: "status", "aria-live": "off" }, ...Object.values(facts));
  const root = make(
    "div", "live", {},
    watching, offer, problem, note, stage, slow, line, buttons,
    make("div", "say", {}, prompt, apply), settings, pads,
  );
  let noteTimer = 0;
  let touched = false; // the prompt was edited and not sent

  const commands = [toggle, step, rewind, restart, snapshot, stop, apply, move, turn, keep];
  const show = (element, text) => {
    element.hidden = !text;
    if (element.textContent !== text) element.textContent = text;
  };

  return {
    root,
    stage,
    parts: { canvas, map, movePad, lookPad, upDown },

    connect(on) {
      for (const [element, work] of [
        [toggle, on.toggle], [step, on.step], [rewind, on.rewind], [restart, on.restart], [snapshot, on.snapshot],
        [stop, on.stop], [claim, on.claim], [again, on.again],
      ]) element.addEventListener("click", () => work());
      const send = () => {
        touched = false;
        on.prompt(prompt.value);
      };
      apply.addEventListener("click", send);
      prompt.addEventListener("input", () => (touched = true));
      prompt.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
        event.preventDefault();
        send();
      });
      move.addEventListener("input", () => on.set({ move: Number(move.value) }));
      turn.addEventListener("input", () => on.set({ turn: Number(turn.value) }));
      keep.addEventListener("change", () => on.set({ keep_going: keep.checked }));
      for (const [slide, output] of [[move, moveShown], [turn, turnShown]]) {
        slide.addEventListener("input", () => (output.value = slide.value));
      }
    },

    keys(held) {
      for (const chip of chips.children) chip.classList.toggle("lbw-down", held.has(chip.dataset.key));
    },

    role(name, reason) {
      const waits = name === "none";
      root.dataset.role = name;
      show(watching, "");
      if (name === "watch" || name === "free") {
        watching.hidden = false;
        watching.replaceChildren(role, claim);
        role.textContent = name === "free" ? say.free : reason ? say.reasons[reason] ?? reason : say.watching;
      }
      show(note, waits ? reason || say.noWorld : "");
      for (const element of commands) element.disabled = name !== "drive";
    },

    connection(state) {
      root.dataset.connection = state;
      if (state === "lost") this.problem(say.lost);
      else if (state === "open") this.problem("");
    },

    offer(chunks) {
      offer.hidden = !chunks;
      offer.firstChild.textContent = chunks ? say.restarted(chunks) : "";
    },

    problem: (text) => show(problem, text),

    note(text) {
      show(note, text);
      clearTimeout(noteTimer);
      noteTimer = setTimeout(() => show(note, ""), 6_000);
    },

    settings(status) {
      if (document.activeElement !== move) [move.value, moveShown.value] = [status.move, status.move];
      if (document.activeElement !== turn) [turn.value, turnShown.value] = [status.turn, status.turn];
      keep.checked = status.keep_going;
      if (!touched && !status.prompt_waits && document.activeElement !== prompt && !status.prompt.startsWith("conditioning ")) {
        prompt.value = status.prompt;
      }
    },

    status(status, picture, dropped, drives) {
      root.dataset.state = status.state;
      const goes = ["running", "waiting", "replaying"].includes(status.state);
      show(toggle, goes ? say.pause : say.start);
      const fact = (name, text) => show(facts[name], text);
      fact("state", say.states[status.state] ?? status.state);
      if (status.chunks === undefined) {
        for (const name of ["chunk", "fps", "latency", "buffer", "memory"]) fact(name, "");
        show(slow, "");
        return;
      }
      rewind.disabled = !drives || !status.chunks;
      fact("chunk", say.chunk(status.chunks, status.seconds));
      fact("fps", say.fps(status.made_fps, picture.fps));
      fact("latency", say.latency(picture.latency));
      fact("buffer", say.buffer(status.buffer, dropped));
      fact("memory", say.memory((status.process_bytes ?? 0) / MIB, status.cache_bytes / MIB));
      show(slow, status.real_time === false && goes ? say.slow(status.made_fps, status.fps) : "");
      if (status.problem) this.problem(status.problem);
      else if (status.notice) show(note, say.reasons[status.notice] ?? status.notice);
    },
  };
}
