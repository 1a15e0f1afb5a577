// The player page: one video of /v1/realtime/video at a time, steered by held keys.

import { UNIT, velocity, watchKeys } from "./player_keys.js";
import { FragmentPlayer, missing } from "./player_stream.js";

const FPS = 16;
const PING = 20_000; // milliseconds; a server reports a stall after 60 s without one
const element = (id) => document.getElementById(id);
const [form, stage, still, video] = ["form", "stage", "still", "video"].map(element);

let run = null; // the video that is being made

const held = watchKeys([...document.querySelectorAll("[data-key]")], () => run?.steer());

function show(facts) {
  for (const [id, text] of Object.entries(facts)) {
    if (element(id).textContent !== String(text)) element(id).textContent = text;
  }
}

function report(problem) {
  element("problem").textContent = problem;
  element("problem").hidden = problem === "";
}

function dataUrl(blob) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => done(reader.result));
    reader.addEventListener("error", () => failed(reader.error));
    reader.readAsDataURL(blob);
  });
}

async function startPicture() {
  const [file] = element("image").files;
  if (file) return dataUrl(file);
  const answer = await fetch("start.png");
  if (!answer.ok) throw new Error(`the built-in start picture is missing (${answer.status})`);
  return dataUrl(await answer.blob());
}

function socketAddress() {
  const address = new URL("/v1/realtime/video", location.href);
  address.protocol = location.protocol === "https:" ? "wss:" : "ws:";
  return address;
}

class Run {
  #socket = new WebSocket(socketAddress());
  #player = new FragmentPlayer(video, (problem) => this.#end("not playable", problem));
  #announced = null; // metadata whose fragment comes next
  #events = 0;
  #frames = 0;
  #arrivals = []; // [milliseconds, frames so far] of the last chunks
  #started = false;
  #over = false;
  #timers = [];

  constructor(picture) {
    const seconds = element("seconds").valueAsNumber;
    const start = {
      type: "session.start",
      prompt: element("prompt").value,
      image_reference: { image_url: picture },
      format: "m4s",
      num_frames: Math.round(seconds * (FPS / 4)) * 4 + 1, // whole latent frames of four
      seed: element("seed").valueAsNumber,
      extra_params: { translation_unit: UNIT, first_delta: "from_rest" },
    };
    const socket = this.#socket;
    socket.binaryType = "arraybuffer";
    socket.addEventListener("open", () => {
      show({ state: "starting" });
      this.#send(start);
    });
    socket.addEventListener("message", ({ data }) => this.#take(data));
    socket.addEventListener("close", ({ code, reason }) => {
      const why = this.#started ? "The server closed the connection" : "The server did not answer";
      this.#end("connection lost", `${why} (${reason || `code ${code}`}). Is it still running? Start again.`);
    });
    this.#timers.push(setInterval(() => this.#started && this.#send({ type: "session.ping" }), PING));
    this.#timers.push(setInterval(() => show({ ahead: this.#player.ahead.toFixed(1) }), 250));
  }

  /** Sends the keys that are held now; they count until others are sent. */
  steer() {
    if (this.#started) this.#interact({ multi_modal_data: { camera: { mode: "velocity", data: velocity(held) } } });
  }

  changePrompt(prompt) {
    this.#interact({ prompt });
  }

  stop() {
    show({ state: "stopping" });
    this.#send({ type: "session.stop" });
  }

  #interact(event) {
    this.#events += 1;
    this.#send({ type: "session.interaction", interaction: { event_id: `page-${this.#events}`, event } });
  }

  #send(message) {
    if (this.#socket.readyState === WebSocket.OPEN) this.#socket.send(JSON.stringify(message));
  }

  #take(data) {
    if (this.#over) return;
    if (data instanceof ArrayBuffer) {
      this.#fragment(new Uint8Array(data));
      return;
    }
    const message = JSON.parse(data);
    switch (message.type) {
      case "video.start":
        this.#begin();
        break;
      case "video.chunk_metadata":
        this.#announced = message;
        break;
      case "session.done":
        this.#end(`done: ${message.chunks} chunks, ${message.reason}`, "");
        break;
      case "error":
        // The error of an interaction ends nothing; before the start there is nothing that could go on.
        report(`${message.message} (${message.code})`);
        if (!this.#started) this.#end("refused", null);
        break;
    }
  }

  #begin() {
    this.#started = true;
    show({ state: "making" });
    video.hidden = false;
    still.hidden = true;
    element("stop").disabled = element("change").disabled = false;
    stage.focus();
    if (held.size) this.steer();
  }

  #fragment(bytes) {
    const { num_frames: frames = 0, generation_chunk_index: chunk = "?" } = this.#announced ?? {};
    this.#announced = null;
    this.#frames += frames;
    this.#player.append(bytes);
    this.#arrivals.push([performance.now(), this.#frames]);
    this.#arrivals = this.#arrivals.slice(-8);
    const [[first, before], [last, now]] = [this.#arrivals[0], this.#arrivals.at(-1)];
    const fps = last > first ? ((1000 * (now - before)) / (last - first)).toFixed(1) : "-";
    show({ chunk, frames: this.#frames, fps });
  }

  /** `problem` is shown; null leaves the one that stands there. */
  #end(state, problem) {
    if (this.#over) return;
    this.#over = true;
    this.#timers.forEach(clearInterval);
    show({ state });
    if (problem !== null) report(problem);
    this.#player.finish(); // what has come is shown to its end
    this.#socket.close();
    run = null;
    element("start").disabled = false;
    element("stop").disabled = element("change").disabled = true;
  }
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  report("");
  element("start").disabled = true;
  show({ state: "connecting", chunk: "-", frames: 0, fps: "-", ahead: "-" });
  try {
    const picture = await startPicture();
    run = new Run(picture);
  } catch (error) {
    element("start").disabled = false;
    show({ state: "not connected" });
    report(`The world cannot be started: ${error.message}.`);
  }
});
element("stop").addEventListener("click", () => run?.stop());
element("change").addEventListener("click", () => run?.changePrompt(element("prompt").value));
element("image").addEventListener("change", () => {
  const [file] = element("image").files;
  URL.revokeObjectURL(still.src);
  still.src = file ? URL.createObjectURL(file) : "start.png";
  still.hidden = false;
  video.hidden = true;
});

if (missing()) {
  report(missing());
  element("start").disabled = true;
  show({ state: "not playable here" });
}
