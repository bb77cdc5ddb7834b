// What differs between two sets of secret values, and how it is shown: by key, each value covered until somebody
// wants to see it.
import {html, useState} from '../vendor/preact.js';
import {visible} from './format.js';
import {Tag} from './ui.js';

// changesOf returns [{key, kind, before, after}] in the order of the keys, kind being added, changed or removed.
export function changesOf(before, after) {
  const keys = [...new Set([...Object.keys(before), ...Object.keys(after)])].sort();
  const has = Object.hasOwn;
  return keys.filter(key => before[key] !== after[key]).map(key => ({
    key, kind: !has(before, key) ? 'added' : has(after, key) ? 'changed' : 'removed', before: before[key], after: after[key],
  }));
}

// patchOf returns the JSON merge patch (RFC 7396) that makes the changes.
export const patchOf = changes => Object.fromEntries(changes.map(c => [c.key, c.kind === 'removed' ? null : c.after]));

const kinds = {added: 'good', changed: 'warn', removed: 'bad'};

function Change({of: {key, kind, before, after}}) {
  const [shown, setShown] = useState(false);
  const line = (word, value) => value !== undefined && html`<div><span class="quiet">${word}</span><code class="secret">${value === '' ? '(empty)' : visible(value)}</code></div>`;
  return html`<li><div class="stack tight grow">
    <div class="row between"><span><${Tag} kind=${kinds[kind]}>${kind}<//> <code>${key}</code></span>
      <button type="button" aria-label=${`${shown ? 'Hide' : 'Show'} the change of ${key}`} onClick=${() => setShown(!shown)}>${shown ? 'Hide' : 'Show'}</button></div>
    ${shown && html`${line('Before', before)}${line('After', after)}`}
  </div></li>`;
}

export const Changes = ({of}) => of.length === 0 ? html`<p>The values are the same.</p>`
  : html`<ul class="list changes" aria-label="Changes">${of.map(c => html`<${Change} key=${c.key} of=${c} />`)}</ul>`;
