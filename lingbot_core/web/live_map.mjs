// The walked way from above: +z up, +x to the right, a wedge where the camera looks.

const MOST = 4000; // points that are kept; longer ways are thinned out

export class WalkedMap {
  #canvas;
  #points = []; // [x, z, degrees to the right, ...]
  #thinned = 1; // latent frames per point

  constructor(canvas) {
    this.#canvas = canvas;
  }

  get points() {
    return this.#points;
  }

  set(points) {
    this.#points = [...points];
    this.draw();
  }

  add(points) {
    this.#points.push(...points);
    if (this.#points.length > MOST) {
      this.#points = this.#points.filter((_, index) => index % 2 === 0 || index === this.#points.length - 1);
      this.#thinned *= 2;
    }
    this.draw();
  }

  /** Forgets what lies behind the first so many latent frames. */
  cut(latents) {
    this.#points.length = Math.min(this.#points.length, Math.ceil(latents / this.#thinned));
    this.draw();
  }

  draw() {
    const { width, height } = this.#canvas;
    const context = this.#canvas.getContext("2d");
    context.clearRect(0, 0, width, height);
    const way = [[0, 0, 0], ...this.#points];
    const [xs, zs] = [way.map(([x]) => x), way.map(([, z]) => z)];
    const [low, high] = [[Math.min(...xs), Math.min(...zs)], [Math.max(...xs), Math.max(...zs)]];
    const span = Math.max(high[0] - low[0], high[1] - low[1], 1);
    const scale = (Math.min(width, height) * 0.76) / span;
    const place = ([x, z]) => [
      width / 2 + (x - (low[0] + high[0]) / 2) * scale,
      height / 2 - (z - (low[1] + high[1]) / 2) * scale,
    ];
    context.lineWidth = 2;
    context.lineJoin = "round";
    context.strokeStyle = "#9ad0ff";
    context.beginPath();
    for (const point of way) context.lineTo(...place(point));
    context.stroke();
    context.fillStyle = "#ffffff80";
    context.beginPath();
    context.arc(...place(way[0]), 3, 0, 2 * Math.PI);
    context.fill();
    const here = way.at(-1);
    context.save();
    context.translate(...place(here));
    context.rotate((here[2] * Math.PI) / 180);
    context.fillStyle = "#ffd166";
    context.beginPath();
    context.moveTo(0, -9);
    context.lineTo(6, 6);
    context.lineTo(0, 3);
    context.lineTo(-6, 6);
    context.fill();
    context.restore();
  }
}
