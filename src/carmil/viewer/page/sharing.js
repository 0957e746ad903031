// The view as a picture, and a link that shows it again.
import { drawView, fileName, pngFile, save, svgFile } from "./export.js";
import { $, say } from "./words.js";

// view(): the slide's name, lines about its answer, and the pictures of the panes; link(): the address of the view.
export function wireSharing({ view, link }) {
  for (const kind of ["png", "svg"]) $(`save-${kind}`).addEventListener("click", () => exportView(kind, view));
  $("copy-link").addEventListener("click", () => copyLink(link()));
}

async function exportView(kind, view) {
  const trouble = $("export-trouble");
  trouble.textContent = "";
  try {
    const { title, lines, panes } = await view(),
      drawing = drawView({ title, lines, panes });
    save(kind === "svg" ? svgFile(drawing) : await pngFile(drawing), fileName(title, `.${kind}`));
    say("picture saved");
  } catch (error) {
    trouble.textContent = `The picture could not be made: ${error.message}`;
  }
}

async function copyLink(address) {
  const link = $("link");
  link.value = address;
  try {
    await navigator.clipboard.writeText(link.value);
    link.hidden = true;
    say("link copied");
    $("copy-link").textContent = "Link copied";
    setTimeout(() => {
      $("copy-link").textContent = "Copy link";
    }, 2000);
  } catch {
    link.hidden = false; // browsers allow copying on secure pages only
    link.select();
    say("copy the link from the field");
  }
}
