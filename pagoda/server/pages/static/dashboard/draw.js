// Drawings on canvases, in the colours of the style sheet.

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// The colour of a request, by its id: the same in the map of blocks and in the list.
export function colourOf(id) {
  let hash = 0;
  for (const letter of id) hash = (hash * 31 + letter.codePointAt(0)) >>> 0;
  return `hsl(${(hash * 47) % 360} 55% 52%)`;
}

function prepare(canvas) {
  const ratio = devicePixelRatio || 1, { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  return { context, width, height };
}

// lines: [{name, values}] of the same length; null where nothing is known. The axis begins at 0.
export function drawLines(canvas, lines, most, format) {
  const { context, width, height } = prepare(canvas);
  const top = Math.max(...lines.flatMap((line) => line.values.filter((value) => value !== null)), 0) || 1;
  const y = (value) => height - 2 - (height - 16) * (value / top);
  context.strokeStyle = colour("line");
  context.beginPath();
  for (const at of [0, top / 2, top]) { context.moveTo(0, y(at)); context.lineTo(width, y(at)); }
  context.stroke();
  for (const { name, values } of lines) {
    context.strokeStyle = colour(name);
    context.lineWidth = 1.5;
    context.beginPath();
    let isOpen = false;
    values.forEach((value, index) => {
      if (value === null) { isOpen = false; return; }
      const x = width - ((values.length - 1 - index) / (most - 1)) * width;
      if (isOpen) context.lineTo(x, y(value)); else context.moveTo(x, y(value));
      isOpen = true;
    });
    context.stroke();
  }
  context.fillStyle = colour("dim");
  context.fillText(format(top), 2, 10);
}

// steps: [number, began, ended, prompt tokens, sampled tokens, preempted, drafted], the last one at the right edge.
export function drawSteps(canvas, steps, seconds) {
  const { context, width, height } = prepare(canvas);
  context.strokeStyle = colour("line");
  context.strokeRect(0, height - 0.5, width, 0);
  if (!steps.length) return;
  const end = steps.at(-1)[2], tallest = Math.max(...steps.map((step) => Math.log2(1 + step[3] + step[4])), 1);
  const paints = ["prompt", "output", "warn"].map(colour);
  for (const [, began, ended, prompt, sampled, preempted] of steps) {
    const x = width * (1 - (end - began) / seconds);
    if (x < -width) continue;
    const wide = Math.max(1, width * (ended - began) / seconds - 0.5), all = prompt + sampled || 1;
    const tall = (height - 10) * Math.log2(1 + all) / tallest, low = tall * sampled / all;
    context.fillStyle = paints[0];
    context.fillRect(x, height - tall, wide, tall - low);
    context.fillStyle = paints[1];
    context.fillRect(x, height - low, wide, low);
    if (preempted) { context.fillStyle = paints[2]; context.fillRect(x, 0, Math.max(2, wide), 6); }
  }
}

// runs: kind, count, kind, count, ...; kind 4 + n is of owners[n].
export function drawBlocks(canvas, runs, owners) {
  const { context, width, height } = prepare(canvas);
  let count = 0;
  for (let at = 1; at < runs.length; at += 2) count += runs[at];
  if (!count) return;
  let side = 16;
  while (side > 2 && Math.floor(width / side) * Math.floor(height / side) < count) side -= 1;
  const columns = Math.max(1, Math.floor(width / side)), gap = side > 4 ? 1 : 0;
  const paints = [...["free", "cached", "shared", "others"].map(colour), ...owners.map(colourOf)];
  let cell = 0;
  for (let at = 0; at < runs.length; at += 2) {
    context.fillStyle = paints[runs[at]];
    for (const stop = cell + runs[at + 1]; cell < stop; cell += 1) {
      context.fillRect((cell % columns) * side, Math.floor(cell / columns) * side, side - gap, side - gap);
    }
  }
}
