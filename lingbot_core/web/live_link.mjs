// The connection to a live world: it introduces itself, comes back when it is lost, and knows the way so far.

const VERSION = 1;
const ASK_EVERY = 5_000; // milliseconds between pings
const PATIENCE = 12_000; // without a word the server is taken for gone: a lid was closed, a cable pulled

/** A name that this page keeps when it is loaded again. */
function pageName() {
  const key = "lingbot-live-page";
  try {
    const known = sessionStorage.getItem(key);
    if (known) return known;
    const name = crypto.randomUUID?.() ?? `page-${Math.random().toString(36).slice(2)}`;
    sessionStorage.setItem(key, name);
    return name;
  } catch {
    return `page-${Math.random().toString(36).slice(2)}`; // no storage here: a new name each time
  }
}

/** Header and picture of a binary message. */
export function readFrame(buffer) {
  const length = new DataView(buffer).getUint32(0);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  return [header, new Uint8Array(buffer, 4 + length)];
}

/** The controls of a walk, line by line, so that it can be walked again on a server that has forgotten it. */
export class Record {
  #head = "";
  #lines = [];

  get length() {
    return this.#head ? this.#lines.length : 0;
  }

  get headed() {
    return this.#head !== "";
  }

  set(text) {
    [this.#head, ...this.#lines] = text.trimEnd().split("\n");
  }

  add(chunk, line) {
    if (chunk > this.#lines.length) return false; // something is missing
    this.#lines.length = chunk;
    this.#lines.push(line);
    return true;
  }

  cut(chunks) {
    this.#lines.length = Math.min(this.#lines.length, chunks);
  }

  clear() {
    this.#head = "";
    this.#lines = [];
  }

  /** Text that the server reads. Its head is never parsed here: a seed may be larger than a number of JavaScript. */
  text() {
    const head = this.#head.replace(/"chunks": \d+/, `"chunks": ${this.#lines.length}`);
    return [head, ...this.#lines].join("\n") + "\n";
  }
}

/**
 * `heard(message)` gets every message of the server, `frame(header, bytes)` every picture, `changed(state)` one of
 * "connecting", "open", "lost" and "closed".
 */
export class Link {
  record = new Record();
  role = "watch";
  instance = "";
  #address;
  #socket = null;
  #wants; // to drive
  #format;
  #events;
  #seq = 0;
  #waiting = new Map(); // seq -> settle
  #timers = [];
  #retry = 300;
  #heardAt = 0;
  #over = false;
  #pending = 0;

  constructor(address, { drive = true, format = "jpeg", heard, frame, changed }) {
    [this.#address, this.#wants, this.#format] = [address, drive, format];
    this.#events = { heard, frame, changed };
    this.#timers.push(setInterval(() => this.#ask(), ASK_EVERY));
    this.#connect();
  }

  /** Sends a message, if there is a connection. Resolves with the server's answer, an error among them. */
  ask(type, fields = {}) {
    this.#seq += 1;
    const seq = this.#seq;
    return new Promise((settle) => {
      if (!this.send(type, { ...fields, seq })) settle({ type: "error", message: "there is no connection", seq });
      else this.#waiting.set(seq, settle);
    });
  }

  /** Sends a message that is not answered. Returns whether there was a connection. */
  send(type, fields = {}) {
    if (this.#socket?.readyState !== WebSocket.OPEN) return false;
    this.#socket.send(JSON.stringify({ type, ...fields }));
    return true;
  }

  /** Another way in which pictures are to come; the connection is made anew. */
  setFormat(format) {
    if (format === this.#format) return;
    this.#format = format;
    this.#socket?.close();
  }

  close() {
    this.#over = true;
    this.#timers.forEach(clearInterval);
    clearTimeout(this.#pending);
    this.#socket?.close();
    this.#socket = null;
    this.#events.changed("closed");
  }

  #connect() {
    if (this.#over) return;
    this.#events.changed("connecting");
    const socket = new WebSocket(this.#address);
    this.#socket = socket;
    socket.binaryType = "arraybuffer";
    socket.addEventListener("open", () => {
      this.#heardAt = performance.now();
      this.send("hello", { v: VERSION, client: pageName(), drive: this.#wants, format: this.#format });
      this.#events.changed("open");
    });
    socket.addEventListener("message", ({ data }) => {
      if (socket === this.#socket) this.#take(data);
    });
    socket.addEventListener("close", () => {
      if (socket === this.#socket) this.#lost();
    });
  }

  #lost() {
    this.#socket = null;
    if (this.#over) return;
    for (const settle of this.#waiting.values()) settle({ type: "error", message: "the connection was lost" });
    this.#waiting.clear();
    this.role = "watch";
    this.#events.changed("lost");
    this.#pending = setTimeout(() => this.#connect(), this.#retry);
    this.#retry = Math.min(3_000, this.#retry * 1.6);
  }

  #ask() {
    if (this.#socket?.readyState !== WebSocket.OPEN) return;
    if (performance.now() - this.#heardAt > PATIENCE) this.#give_up();
    else this.send("ping", { t: Math.round(performance.now()) });
  }

  #give_up() {
    const socket = this.#socket;
    this.#lost(); // a socket to nowhere takes minutes to close
    socket?.close();
  }

  #take(data) {
    this.#heardAt = performance.now();
    if (data instanceof ArrayBuffer) {
      this.#events.frame(...readFrame(data));
      return;
    }
    const message = JSON.parse(data);
    this.#remember(message);
    const settle = this.#waiting.get(message.seq);
    if (settle && (message.type === "done" || message.type === "error")) {
      this.#waiting.delete(message.seq);
      settle(message);
    }
    this.#events.heard(message);
  }

  #remember(message) {
    switch (message.type) {
      case "hello": {
        this.#retry = 300;
        this.role = message.role;
        // Another server, or the same one started anew: what is written down is all that is left of the walk.
        message.again = this.instance !== "" && this.instance !== message.instance && message.path.length === 0;
        message.fresh = this.instance !== message.instance;
        this.instance = message.instance;
        if (!message.again) this.record.clear();
        if (message.path.length) this.#fetchRecord();
        break;
      }
      case "role":
        this.role = message.role;
        // A page that was replaced does not fight for its place.
        this.#wants = message.role === "drive";
        break;
      case "line":
        if (message.chunk === 0) this.record.clear();
        if (!this.record.headed || !this.record.add(message.chunk, message.line)) this.#fetchRecord();
        break;
      case "rewound":
        this.record.cut(message.chunks);
        break;
    }
  }

  async #fetchRecord() {
    const answer = await this.ask("record");
    if (answer.type === "done") this.record.set(answer.record);
  }
}
