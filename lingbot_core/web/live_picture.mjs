// The newest frame of a live world on a canvas, how many a second are seen, and how long ago they were asked for.

const SECONDS = 2_000; // milliseconds over which frames a second are counted

export class Picture {
  latency = null; // milliseconds from a key to the first picture that knows of it: the median of late
  onlatency = () => {}; // gets each of them
  #canvas;
  #context;
  #newest = 0;
  #seen = [];
  #asked = []; // [number of a control, when it was sent]
  #latencies = [];

  constructor(canvas) {
    this.#canvas = canvas;
    this.#context = canvas.getContext("2d");
  }

  /** Frames a second that are seen. */
  get fps() {
    const now = performance.now();
    this.#seen = this.#seen.filter((time) => now - time < SECONDS);
    if (this.#seen.length < 2) return 0;
    return (1000 * (this.#seen.length - 1)) / Math.max(1, this.#seen.at(-1) - this.#seen[0]);
  }

  /** A control was sent; the first frame that has it tells how long it took. */
  asked(seq) {
    this.#asked.push([seq, performance.now()]);
    if (this.#asked.length > 200) this.#asked.shift();
  }

  /** Another server counts from the beginning. */
  forget() {
    this.#newest = 0;
    this.#asked = [];
  }

  async show(header, bytes) {
    const image = await createImageBitmap(new Blob([bytes], { type: `image/${header.format}` }));
    // Decoding may overtake; an old picture is never drawn over a new one.
    if (header.frame < this.#newest) {
      image.close();
      return false;
    }
    this.#newest = header.frame;
    if (this.#canvas.width !== image.width || this.#canvas.height !== image.height) {
      [this.#canvas.width, this.#canvas.height] = [image.width, image.height];
    }
    this.#context.drawImage(image, 0, 0);
    image.close();
    if (header.chunk >= 0 && header.of > 1) this.#seen.push(performance.now());
    if (header.index === 0 && header.seq >= 0) this.#measure(header.seq);
    return true;
  }

  #measure(seq) {
    const now = performance.now();
    const answered = this.#asked.filter(([asked]) => asked <= seq).map(([, sent]) => now - sent);
    this.#asked = this.#asked.filter(([asked]) => asked > seq);
    if (!answered.length) return;
    answered.forEach((latency) => this.onlatency(latency));
    this.#latencies = [...this.#latencies, ...answered].slice(-15);
    this.latency = [...this.#latencies].sort((a, b) => a - b)[this.#latencies.length >> 1];
  }
}
