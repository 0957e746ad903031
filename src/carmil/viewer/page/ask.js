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

export const thumbnailOf = number => `api/case/${number}/thumbnail.jpeg`;
export const pictureOf = (number, instance) => `api/case/${number}/instance/${instance}.jpeg`;
