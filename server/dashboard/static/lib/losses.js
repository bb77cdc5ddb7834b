// Who would lose what by a change of access: what was done in the last 30 days, judged by the policies after it.
import {html, useState} from '../vendor/preact.js';
import {useAccount} from './account.js';
import {post} from './api.js';
import {count, number} from './format.js';
import {namesOf} from './names.js';
import {Act, Hash, Link, Name, Table, Tag, Time} from './ui.js';
import {Subject} from './subjects.js';

const mostPages = 200;

// tryChange asks page by page, and adds up the uses of one caller, credential and verb.
async function tryChange(change) {
  const losses = new Map();
  let answer, unjudged = 0, cursor, pages = 0;
  do {
    answer = await post('/api/v2/access/dry-run', {...change, cursor});
    for (const loss of answer.losses) {
      const key = JSON.stringify([loss.actor.id, loss.credential_id, loss.verb]), was = losses.get(key);
      losses.set(key, {...loss, key, uses: loss.uses + (was?.uses ?? 0), last_used_at: was && was.last_used_at > loss.last_used_at ? was.last_used_at : loss.last_used_at});
    }
    unjudged += answer.unjudged;
    cursor = answer.next_cursor;
  } while (cursor && ++pages < mostPages);
  return {losses: [...losses.values()].sort((a, b) => a.last_used_at < b.last_used_at ? 1 : -1), unjudged, from: answer.from, whole: !cursor};
}

// Losses offers the question for a change, which is null while it is not complete. The answer is shown as long as the
// change is the one that was asked about.
export function Losses({change, access}) {
  const account = useAccount();
  const [found, setFound] = useState(null);
  const wanted = JSON.stringify(change);
  const ask = async () => {
    const result = await tryChange(change);
    const unknown = result.losses.map(l => l.actor.id).filter(id => id && access.of(id).name === undefined); // such as a ServiceAccount by its UID
    setFound({...result, names: await namesOf(account, unknown), wanted});
  };
  const shown = found?.wanted === wanted ? found : null;
  const actor = l => ({...access.of(l.actor.id), ...(found.names.has(l.actor.id) ? {name: found.names.get(l.actor.id).name} : {}), ...(l.actor.type === 'service_account' ? {kind: 'ServiceAccount'} : {})});
  return html`<div class="stack tight losses">
    <div class="actions"><${Act} disabled=${!change} onClick=${ask}>Who would lose what<//></div>
    <div role="status">${!shown ? html`<p class="hint">Looks at what was done in the last 30 days, and changes nothing.</p>`
    : shown.losses.length === 0 ? html`<p><${Tag} kind="good">nobody<//> What was done since <${Time} at=${shown.from} /> stays allowed.</p>`
    : html`<p><${Tag} kind="warn">${count(shown.losses.length, 'loss', 'losses')}<//> Since <${Time} at=${shown.from} /> this was done, and would be refused:</p>`}
    ${shown && shown.unjudged > 0 && html`<p class="hint">${count(shown.unjudged, 'use')} by ServiceAccounts could not be judged: the log does not have their names.</p>`}
    ${shown && !shown.whole && html`<p class="hint">The log has more than was read. <code>latticekeep access</code> with <code>--dry-run</code> reads all of it.</p>`}</div>
    ${shown && shown.losses.length > 0 && html`<${Table} caption="Who would lose what" rowKey="key" rows=${shown.losses} columns=${[
      {title: 'Who', class: 'words', cell: l => html`<${Subject} of=${actor(l)} />`},
      {title: 'Loses', class: 'words', cell: l => html`<span><strong>${l.verb}</strong>${' '}${l.name ? html`<${Link} to=${'/vault/' + encodeURIComponent(l.credential_id)}><${Name}>${l.name}<//><//>` : html`<${Hash}>${l.credential_id}<//>`}</span>`},
      {title: 'Uses', cell: l => number(l.uses)},
      {title: 'Last', class: 'once', cell: l => html`<${Time} at=${l.last_used_at} relative />`},
    ]} />`}
  </div>`;
}
