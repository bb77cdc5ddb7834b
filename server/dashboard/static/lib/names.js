// What ids are called, which takes audit:names: whoever may not read that sees the ids.
import {useEffect, useRef, useState} from '../vendor/preact.js';
import {useAccount} from './account.js';
import {post} from './api.js';

const perRequest = 200;

// idsOf returns whom and what entries are about.
export const idsOf = entries => entries.flatMap(e => [e.actor.id, e.resource.id]);

// namesOf returns {name, type, gone} by id, without those that have no name.
export async function namesOf(account, ids) {
  const found = new Map(), wanted = account.can('audit:names') ? [...new Set(ids)].filter(Boolean) : [];
  for (let i = 0; i < wanted.length; i += perRequest) {
    const {names} = await post('/api/v2/audit/names', {ids: wanted.slice(i, i + perRequest)});
    for (const name of names) found.set(name.id, name);
  }
  return found;
}

// useNames is namesOf the ids of a page, as they come. An id is asked for once.
export function useNames(ids) {
  const account = useAccount();
  const [names, setNames] = useState(new Map()), asked = useRef(new Set());
  useEffect(() => {
    const wanted = [...new Set(ids)].filter(id => !asked.current.has(id));
    wanted.forEach(id => asked.current.add(id));
    namesOf(account, wanted).then(
      found => { if (found.size > 0) setNames(known => new Map([...known, ...found])); },
      () => wanted.forEach(id => asked.current.delete(id))); // the ids say enough until there are others
  }, [ids.join()]);
  return names;
}
