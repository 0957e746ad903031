// The view as a picture: what the panes show, their legends, the answer and the slide's name, as SVG, or PNG made of it.
import { css } from "./colours.js";
import { svg } from "./words.js";

const MARGIN = 20,
  GAP = 16,
  LINE = 18, // pixels from one line of text to the next
  BAR = 12, // height of a colour scale
  SIZE = 13, // of text
  NARROWEST = 480; // pixels that the text needs
const FONT = "Helvetica, Arial, sans-serif",
  INK = "#1c2330",
  SOFT = "#5b6474";
const LINKS = "http://www.w3.org/1999/xlink";
const SHARP = 2; // pixels of the PNG per pixel of the page
export const RESEARCH = "research use only";

const pen = new OffscreenCanvas(1, 1).getContext("2d");

// Lines of text that fit into a width, broken between words.
function wrapped(text, room, size = SIZE) {
  pen.font = `${size}px ${FONT}`;
  const lines = [];
  for (const word of text.split(/\s+/)) {
    const longer = lines.length ? `${lines.at(-1)} ${word}` : word;
    if (lines.length && pen.measureText(longer).width <= room) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines;
}

// Draws lines of text below one another; returns the y below them.
function write(drawing, text, { x, y, room, size = SIZE, fill = INK, ...more }) {
  for (const line of wrapped(text, room, size)) {
    drawing.append(svg("text", { x, y: y + LINE - 5, "font-size": size, fill, text: line, ...more }));
    y += LINE * Math.max(1, size / SIZE);
  }
  return y;
}

function layers(drawing, { layers: some, width, height }, x, y) {
  for (const layer of some) {
    const image = svg("image", { x, y, width, height, preserveAspectRatio: "none" });
    image.setAttributeNS(LINKS, "xlink:href", layer);
    drawing.append(image);
  }
  drawing.append(svg("rect", { x, y, width, height, fill: "none", stroke: "#dfe3ea" }));
}

function scaleBar(drawing, { length, text }, x, y) {
  drawing.append(
    svg("rect", { x, y: y - 26, width: length + 16, height: 30, fill: "#fff", "fill-opacity": 0.85, rx: 3 }),
    svg("rect", { x: x + 8, y: y - 4, width: length, height: 4, fill: INK }),
    svg("text", { x: x + 8 + length / 2, y: y - 10, "font-size": 12, "text-anchor": "middle", fill: INK, text }),
  );
}

// The legend below a pane; returns the y below it.
function legend(drawing, { title, ends, colours, notes }, { x, y, room, id }) {
  y = write(drawing, title, { x, y, room, "font-weight": 700 });
  if (colours) {
    const stops = colours.map((colour, i) => svg("stop", { offset: i / (colours.length - 1), "stop-color": css(colour) }));
    drawing.append(
      svg("defs", {}, [svg("linearGradient", { id }, stops)]),
      svg("rect", { x, y: y + 4, width: room, height: BAR, fill: `url(#${id})`, stroke: "#dfe3ea" }),
    );
    y += BAR + 6;
    const part = room / 2 - 24,
      at = [x, x + room / 2, x + room],
      anchors = ["start", "middle", "end"];
    const below = ends.map((text, i) =>
      write(drawing, text, { x: at[i], y, room: i === 1 ? 60 : part, size: 12, "text-anchor": anchors[i] }),
    );
    y = Math.max(y, ...below);
  }
  for (const note of notes) y = write(drawing, note, { x, y, room, size: 12, fill: SOFT });
  return y;
}

// panes: what `Scene.pictures` gives; title: the slide's name; lines: the answer. Returns an SVG element.
export function drawView({ panes, title, lines }) {
  const wide = panes.reduce((sum, { width }) => sum + width, GAP * (panes.length - 1)),
    inner = Math.max(NARROWEST, wide),
    drawing = svg("svg", { "font-family": FONT });
  let y = MARGIN;
  write(drawing, RESEARCH.toUpperCase(), { x: MARGIN + inner, y, room: inner, "text-anchor": "end", fill: SOFT });
  y = write(drawing, title, { x: MARGIN, y, room: inner - 180, size: 17, "font-weight": 700 });
  for (const line of lines) y = write(drawing, line, { x: MARGIN, y, room: inner });
  y += 8;
  let x = MARGIN;
  const bottom = y + Math.max(...panes.map(({ height }) => height));
  let end = bottom;
  panes.forEach((pane, i) => {
    layers(drawing, pane, x, y);
    if (pane.scaleBar) scaleBar(drawing, pane.scaleBar, x + 8, y + pane.height - 14);
    const room = panes.length === 1 ? inner : pane.width;
    end = Math.max(end, legend(drawing, pane, { x, y: bottom + 6, room, id: `scale-${i}` }));
    x += pane.width + GAP;
  });
  end = write(drawing, `Made with carmil. ${RESEARCH[0].toUpperCase()}${RESEARCH.slice(1)}.`, {
    x: MARGIN,
    y: end + 6,
    room: inner,
    size: 12,
    fill: SOFT,
  });
  const [width, height] = [Math.ceil(inner + 2 * MARGIN), Math.ceil(end + MARGIN - 8)];
  for (const [name, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` }))
    drawing.setAttribute(name, value);
  drawing.prepend(svg("rect", { width, height, fill: "#fff" }));
  return drawing;
}

export const svgFile = drawing => new Blob([new XMLSerializer().serializeToString(drawing)], { type: "image/svg+xml" });

export async function pngFile(drawing) {
  const address = URL.createObjectURL(svgFile(drawing)),
    image = new Image();
  try {
    image.src = address;
    await image.decode();
    const canvas = new OffscreenCanvas(SHARP * drawing.getAttribute("width"), SHARP * drawing.getAttribute("height"));
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    return await canvas.convertToBlob({ type: "image/png" });
  } finally {
    URL.revokeObjectURL(address);
  }
}

export function save(file, name) {
  const link = document.createElement("a"),
    address = URL.createObjectURL(file);
  Object.assign(link, { href: address, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

// A file name for any slide.
export const fileName = (slide, rest) => `${slide.replace(/[^\p{L}\p{N} ._-]/gu, "_").replace(/^\.+/, "_")}${rest}`;
