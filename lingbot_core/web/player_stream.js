// Fragments of mp4, as they come, into a video element.

const KEEP = 20; // seconds behind the picture that stay in the buffer
const CATCH_UP = 1.5; // seconds ahead from which the video plays faster, so that keys are felt soon

const Source = window.ManagedMediaSource ?? window.MediaSource;

/** Why this browser cannot play a stream, or "". */
export function missing() {
  return Source === undefined
    ? "This browser has no Media Source Extensions, which playing a world needs; use a current Chromium, Firefox or Safari."
    : "";
}

/** The type of a stream whose init segment is in `bytes`, such as video/mp4; codecs="avc1.64000d"; "" without one. */
export function streamType(bytes) {
  // The decoder's configuration: "avcC", a version, then profile, compatibility and level.
  for (let at = 4; at + 8 <= bytes.length; at += 1) {
    if (bytes[at] === 0x61 && bytes[at + 1] === 0x76 && bytes[at + 2] === 0x63 && bytes[at + 3] === 0x43) {
      const code = [...bytes.subarray(at + 5, at + 8)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
      return `video/mp4; codecs="avc1.${code}"`;
    }
  }
  return "";
}

export class FragmentPlayer {
  #video;
  #media = new Source();
  #buffer = null;
  #waiting = [];
  #ended = false;
  #failed;
  #opened;

  /** `failed(message)` is called once when the stream cannot be played. */
  constructor(video, failed) {
    this.#video = video;
    this.#failed = failed;
    this.#opened = new Promise((done) => this.#media.addEventListener("sourceopen", done, { once: true }));
    video.disableRemotePlayback = true; // ManagedMediaSource asks for it
    const address = URL.createObjectURL(this.#media);
    this.#opened.then(() => URL.revokeObjectURL(address));
    video.src = address;
    video.addEventListener("error", () => this.#fail(`The video cannot be decoded: ${video.error?.message || "unknown"}.`));
  }

  /** Seconds that are there and not yet shown. */
  get ahead() {
    const { buffered, currentTime } = this.#video;
    return buffered.length ? Math.max(0, buffered.end(buffered.length - 1) - currentTime) : 0;
  }

  /** Adds a fragment, a Uint8Array; the first one brings the init segment. */
  async append(bytes) {
    this.#waiting.push(bytes);
    if (this.#waiting.length === 1 && this.#buffer === null) {
      await this.#opened;
      const type = streamType(bytes);
      if (!type) return this.#fail("The first fragment has no init segment of an H.264 video.");
      if (!Source.isTypeSupported(type)) {
        return this.#fail(`This browser cannot decode ${type}; use one that plays H.264 video.`);
      }
      this.#buffer = this.#media.addSourceBuffer(type);
      this.#buffer.addEventListener("updateend", () => this.#pump());
      this.#video.play().catch(() => {}); // it is muted; a browser that still refuses shows its own button
    }
    this.#pump();
  }

  /** No fragment follows. */
  finish() {
    this.#ended = true;
    this.#pump();
  }

  #pump() {
    const buffer = this.#buffer;
    if (buffer === null || buffer.updating || this.#media.readyState !== "open") return;
    const { currentTime } = this.#video;
    this.#video.playbackRate = this.ahead > CATCH_UP && !this.#ended ? 1.25 : 1;
    if (buffer.buffered.length && buffer.buffered.start(0) < currentTime - 2 * KEEP) {
      buffer.remove(0, currentTime - KEEP);
    } else if (this.#waiting.length) {
      this.#give(buffer, currentTime);
    } else if (this.#ended) {
      this.#end();
    }
  }

  #give(buffer, currentTime) {
    try {
      buffer.appendBuffer(this.#waiting[0]);
      this.#waiting.shift();
    } catch (error) {
      if (error.name !== "QuotaExceededError") this.#fail(`A fragment cannot be played: ${error.message}`);
      // The buffer is full: it is emptied behind the picture, and tried again when that has gone on.
      else if (buffer.buffered.start(0) < currentTime - 1) buffer.remove(0, currentTime - 1);
      else setTimeout(() => this.#pump(), 500);
    }
  }

  #end() {
    try {
      this.#media.endOfStream();
    } catch {
      // It is being updated or over already.
    }
  }

  #fail(message) {
    const failed = this.#failed;
    this.#failed = null;
    failed?.(message);
  }
}
