// What the server knows of a case: its answer, its places and its maps, each asked for once.
import { ask } from "./ask.js";
import { Places } from "./plane.js";
import { many } from "./words.js";

/** {number, info, places, maps, signal}; places is null if the positions of the instances are unknown. */
export async function fetchCase(number, signal) {
  const info = await ask(`case/${number}`, { signal });
  const places = info.places ? new Places(await ask(`case/${number}/places`, { signal }), info.tile_size) : null;
  return { number, info, places, signal, maps: new Map() };
}

/** The map of a case, for an output where every output has its own. */
export function fetchMap(mine, name, c) {
  const key = `${name}/${c}`;
  if (!mine.maps.has(key))
    mine.maps.set(
      key,
      ask(`case/${mine.number}/map/${name}?class=${c}`, { signal: mine.signal }).catch(error => {
        mine.maps.delete(key);
        throw error;
      }),
    );
  return mine.maps.get(key);
}

/** A line about a case and its row of the list. */
export function facts({ info, places }, row) {
  return [
    many(info.instances, places ? "tile" : "instance") + geometry(info),
    info.picture?.mpp ? `slide ${Number(info.picture.mpp.toPrecision(3))} µm/px` : null,
    places && !info.picture ? "no slide file" : null,
    row.patient && row.patient !== row.slide ? `patient ${row.patient}` : null,
    row.fold !== null && row.fold !== undefined ? `fold ${row.fold}` : null,
  ]
    .filter(Boolean)
    .join(" · ");
}

// What the encoder got of a tile, where the features say it.
function geometry({ tile_pixels: pixels, tile_mpp: mpp }) {
  const known = [pixels ? `${pixels} px` : null, mpp ? `${Number(mpp.toPrecision(3))} µm/px` : null].filter(Boolean);
  return known.length ? ` of ${known.join(" at ")}` : "";
}
