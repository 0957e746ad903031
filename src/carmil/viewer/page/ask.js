// Questions to the server. An answer that is no answer becomes an Error with one clear line.

export class Refused extends Error {}

export async function ask(path, { signal, body } = {}) {
  const options =
    body === undefined
      ? { signal }
      : { signal, method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  let answer;
  try {
    answer = await fetch(`api/${path}`, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The server does not answer. Is “carmil view” still running?");
  }
  let said;
  try {
    said = await answer.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(`The server's answer could not be read (${answer.status}).`);
  }
  if (!answer.ok) throw new Refused(said.error ?? `The server refused (${answer.status}).`);
  return said;
}

const AT_ONCE = 2; // of some six connections that a browser opens: the tiles of the slide have the others
const waiting = [];
let loading = 0;

// Load a small picture when few others are loading; one that has left the page by then is not loaded.
export function loadPicture(picture, address) {
  waiting.push({ picture, address });
  setTimeout(loadNext); // once the picture is on the page
  return picture;
}

function loadNext() {
  while (loading < AT_ONCE && waiting.length) {
    const { picture, address } = waiting.shift();
    if (!picture.isConnected) continue;
    const ended = () => {
      loading--;
      loadNext();
    };
    for (const event of ["load", "error"]) picture.addEventListener(event, ended, { once: true });
    loading++;
    picture.src = address;
  }
}

export const thumbnailOf = number => `api/case/${number}/thumbnail.jpeg`;
export const pictureOf = (number, instance) => `api/case/${number}/instance/${instance}.jpeg`;
