// Held keys as the camera's step of one latent frame, in OpenCV axes: +x right, +y down, +z forward.

const MOVE = 0.05; // units of the world
const PITCH = 4; // degrees
const YAW = 6;

export const KEYS = ["w", "a", "s", "d", "i", "j", "k", "l"];
export const UNIT = MOVE;

/** {translation: [x, y, z], rotation: [x, y, z, w]} of a set of keys; opposite keys cancel. */
export function velocity(held) {
  const axis = (plus, minus) => Number(held.has(plus)) - Number(held.has(minus));
  const pitch = (axis("i", "k") * PITCH * Math.PI) / 360; // half angles, as quaternions have them
  const yaw = (axis("l", "j") * YAW * Math.PI) / 360;
  const forward = axis("w", "s") * MOVE;
  const right = axis("d", "a") * MOVE;
  // The step turns first and then moves in the ground plane.
  const [sin, cos] = [Math.sin(2 * yaw), Math.cos(2 * yaw)];
  return {
    translation: [forward * sin + right * cos, 0, forward * cos - right * sin],
    rotation: [
      Math.cos(yaw) * Math.sin(pitch),
      Math.sin(yaw) * Math.cos(pitch),
      -Math.sin(yaw) * Math.sin(pitch),
      Math.cos(yaw) * Math.cos(pitch),
    ],
  };
}

/** Calls `changed(set of keys)` whenever a key of the keyboard or a button with data-key goes down or up. */
export function watchKeys(buttons, changed) {
  const held = new Set();

  const set = (key, down) => {
    if (held.has(key) === down) return;
    if (down) held.add(key);
    else held.delete(key);
    for (const button of buttons) {
      if (button.dataset.key === key) button.setAttribute("aria-pressed", String(down));
    }
    changed(held);
  };
  const releaseAll = () => [...held].forEach((key) => set(key, false));
  // The place on the keyboard counts, so that the keys lie together on every layout.
  const keyOf = (event) => KEYS.find((key) => event.code === `Key${key.toUpperCase()}`);
  const typing = (target) => target instanceof Element && target.closest("input, textarea, select") !== null;

  window.addEventListener("keydown", (event) => {
    const key = keyOf(event);
    if (key === undefined || typing(event.target) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    set(key, true);
  });
  window.addEventListener("keyup", (event) => {
    const key = keyOf(event);
    if (key !== undefined) set(key, false);
  });
  // A window that lost the focus hears no key going up.
  window.addEventListener("blur", releaseAll);
  document.addEventListener("visibilitychange", () => document.hidden && releaseAll());

  for (const button of buttons) {
    const key = button.dataset.key;
    button.addEventListener("pointerdown", (event) => {
      button.setPointerCapture(event.pointerId);
      set(key, true);
    });
    for (const end of ["pointerup", "pointercancel", "lostpointercapture", "blur"]) {
      button.addEventListener(end, () => set(key, false));
    }
    const presses = (event) => event.key === " " || event.key === "Enter";
    button.addEventListener("keydown", (event) => presses(event) && (event.preventDefault(), set(key, true)));
    button.addEventListener("keyup", (event) => presses(event) && set(key, false));
    button.addEventListener("contextmenu", (event) => event.preventDefault()); // a long touch holds the key
  }
  return held;
}
