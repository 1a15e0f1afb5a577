// What hands do, as the controls of a live world: keys, a mouse that is dragged, pads for thumbs, a gamepad.

// The place on the keyboard counts, so that the keys lie together on every layout. Arrows look.
const CODES = {
  KeyW: "w", KeyA: "a", KeyS: "s", KeyD: "d", KeyQ: "q", KeyE: "e",
  KeyI: "i", KeyJ: "j", KeyK: "k", KeyL: "l",
  ArrowUp: "i", ArrowDown: "k", ArrowLeft: "j", ArrowRight: "l",
};
export const KEYS = ["w", "a", "s", "d", "q", "e", "i", "j", "k", "l"];
const REPEAT = 1_000; // milliseconds after which what is held is said again
const PACE = 50; // milliseconds between messages of a mouse or a stick
const DEGREES_ACROSS = 90; // that a drag over the whole picture turns
const DEAD = 0.15; // of a stick that lies still

const isField = (target) => target instanceof Element && target.closest("input, textarea, select") !== null;
const still = () => [0, 0, 0, 0, 0]; // forward, right, up, pitch, yaw

/**
 * What is held and pushed now, and what to tell of it. `send(fields, repeated)` gets each control message without its
 * number; a repeated one says nothing new.
 */
export class Input {
  held = new Set();
  #sources = new Map(); // what holds a key: a keyboard code, a button
  #axes = { pads: still(), gamepad: still() };
  #look = [0, 0];
  #press = "";
  #send;
  #changed;
  #timer = 0;
  #repeat;

  constructor(send, changed = () => {}) {
    [this.#send, this.#changed] = [send, changed];
    this.#repeat = setInterval(() => (this.held.size || this.axes.some(Boolean)) && this.#tell(true), REPEAT);
  }

  get axes() {
    const both = this.#axes.pads.map((value, index) => value + this.#axes.gamepad[index]);
    return both.map((value) => Math.max(-1, Math.min(1, value)));
  }

  /** A key goes down; `source` is what holds it. */
  down(key, source = key) {
    if (this.#sources.has(source)) return;
    this.#sources.set(source, key);
    if (this.held.has(key)) return; // another source holds it already
    this.held.add(key);
    this.#press += key;
    this.#tell();
  }

  up(source) {
    const key = this.#sources.get(source);
    this.#sources.delete(source);
    if (key === undefined || [...this.#sources.values()].includes(key)) return;
    this.held.delete(key);
    this.#tell();
  }

  /** Nobody hears a key going up any more: everything is up. */
  release() {
    if (!this.#sources.size && !this.#axes.pads.some(Boolean)) return;
    this.#sources.clear();
    this.held.clear();
    this.#axes.pads = still();
    this.#tell();
  }

  look(right, up) {
    this.#look[0] += right;
    this.#look[1] += up;
    this.#tellSoon();
  }

  push(source, values) {
    const rounded = values.map((value) => Math.round(value * 50) / 50);
    if (rounded.every((value, index) => value === this.#axes[source][index])) return;
    this.#axes[source] = rounded;
    if (rounded.some(Boolean)) this.#tellSoon();
    else this.#tell();
  }

  dispose() {
    clearInterval(this.#repeat);
    clearTimeout(this.#timer);
  }

  #tellSoon() {
    if (!this.#timer) this.#timer = setTimeout(() => this.#tell(), PACE);
  }

  #tell(repeated = false) {
    clearTimeout(this.#timer);
    this.#timer = 0;
    const fields = {
      press: this.#press,
      held: [...this.held].sort().join(""),
      axes: this.axes,
      look: this.#look.map((degrees) => Math.round(degrees * 100) / 100),
    };
    this.#send(fields, repeated);
    this.#press = "";
    this.#look = [0, 0];
    this.#changed();
  }
}

/**
 * Keys count while the focus is inside of `root`, and nothing that is typed there reaches whatever is around it; keys with
 * Ctrl, Alt or Meta go their way. `leave()` is called for Escape, `toggle()` for the space bar.
 */
export function watchKeyboard(root, input, { leave, toggle, enabled = () => true }) {
  const modified = (event) => event.ctrlKey || event.metaKey || event.altKey;

  const down = (event) => {
    if (modified(event)) return;
    event.stopPropagation();
    if (isField(event.target)) return;
    if (event.code === "Escape") {
      leave();
      return;
    }
    if (event.code === "Space" && !(event.target instanceof HTMLButtonElement)) {
      event.preventDefault();
      if (!event.repeat) toggle();
      return;
    }
    const key = CODES[event.code];
    if (key === undefined) return;
    event.preventDefault();
    if (!event.repeat && enabled()) input.down(key, event.code);
  };
  const up = (event) => {
    // A key that went down here goes up here, whatever is held with it by now.
    if (!modified(event)) event.stopPropagation();
    if (CODES[event.code] !== undefined) input.up(event.code);
  };
  const out = (event) => {
    if (!root.contains(event.relatedTarget) || isField(event.relatedTarget)) input.release();
  };
  const hidden = () => document.hidden && input.release();
  const release = () => input.release();

  root.addEventListener("keydown", down);
  root.addEventListener("keyup", up);
  root.addEventListener("keypress", (event) => modified(event) || event.stopPropagation());
  root.addEventListener("focusout", out);
  window.addEventListener("blur", release);
  document.addEventListener("visibilitychange", hidden);
  return () => {
    window.removeEventListener("blur", release);
    document.removeEventListener("visibilitychange", hidden);
    input.release();
  };
}

/** A pointer that is dragged over the picture turns the camera: to the right looks right, up looks up. */
export function watchDrag(picture, input, { enabled = () => true }) {
  let last = null;
  picture.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !enabled()) return;
    last = [event.clientX, event.clientY];
    picture.setPointerCapture(event.pointerId);
    event.stopPropagation(); // a node that would be moved
  });
  picture.addEventListener("pointermove", (event) => {
    if (last === null) return;
    // As large as it is drawn: a graph that is zoomed scales it.
    const scale = DEGREES_ACROSS / Math.max(1, picture.getBoundingClientRect().width);
    input.look((event.clientX - last[0]) * scale, (last[1] - event.clientY) * scale);
    last = [event.clientX, event.clientY];
    event.stopPropagation();
  });
  const end = () => (last = null);
  picture.addEventListener("pointerup", end);
  picture.addEventListener("pointercancel", end);
}

/** A pad for a thumb: `axes(x, y)` gives the axes for -1..1 to the right and up. */
export function watchPad(pad, input, axes, { enabled = () => true }) {
  const knob = pad.querySelector("span");
  let held = null;
  const move = (event) => {
    const box = pad.getBoundingClientRect();
    const at = (value, low, size) => Math.max(-1, Math.min(1, (2 * (value - low)) / size - 1));
    const [x, y] = [at(event.clientX, box.left, box.width), -at(event.clientY, box.top, box.height)];
    knob.style.transform = `translate(${x * 100}%, ${-y * 100}%)`;
    input.push("pads", axes(x, y));
  };
  const end = () => {
    if (held === null) return;
    held = null;
    knob.style.transform = "";
    input.push("pads", still());
  };
  pad.addEventListener("pointerdown", (event) => {
    if (!enabled()) return;
    held = event.pointerId;
    pad.setPointerCapture(held);
    event.stopPropagation();
    event.preventDefault();
    move(event);
  });
  pad.addEventListener("pointermove", (event) => event.pointerId === held && move(event));
  pad.addEventListener("pointerup", end);
  pad.addEventListener("pointercancel", end);
}

/** The axes of a gamepad of the standard layout: left stick moves, right stick looks, triggers go down and up. */
export function gamepadAxes(pad) {
  const stick = (value = 0) => (Math.abs(value) < DEAD ? 0 : (value - Math.sign(value) * DEAD) / (1 - DEAD));
  const [x, y, lookX, lookY] = pad.axes.map(stick);
  const up = (pad.buttons[7]?.value ?? 0) - (pad.buttons[6]?.value ?? 0);
  return [-(y ?? 0), x ?? 0, up, -(lookY ?? 0), lookX ?? 0].map((value) => value + 0);
}

/** Looks at the gamepads as long as there is one. Returns what ends it. */
export function watchGamepads(input, { enabled = () => true }) {
  let timer = 0;
  const look = () => {
    const pads = [...(navigator.getGamepads?.() ?? [])].filter((pad) => pad?.connected);
    const pad = pads.find((one) => one.mapping === "standard") ?? pads[0];
    input.push("gamepad", pad && enabled() ? gamepadAxes(pad) : still());
    if (!pads.length) {
      clearInterval(timer);
      timer = 0;
    }
  };
  const begin = () => (timer ||= setInterval(look, PACE));
  window.addEventListener("gamepadconnected", begin);
  if ([...(navigator.getGamepads?.() ?? [])].some(Boolean)) begin();
  return () => {
    clearInterval(timer);
    window.removeEventListener("gamepadconnected", begin);
  };
}
