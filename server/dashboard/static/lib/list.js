// Long lists: what is shown of them is narrowed by text.
import {html, useState} from '../vendor/preact.js';
import {count} from './format.js';
import {Input} from './ui.js';

const few = 8, most = 200;

// Narrowed hands the rows that contain a text, in what textOf(row) says, to children. A short list has no field.
export function Narrowed({rows, label, textOf, children}) {
  const [text, setText] = useState('');
  if (rows.length <= few) return children(rows);
  const wanted = text.trim().normalize().toLowerCase();
  const found = wanted === '' ? rows : rows.filter(row => textOf(row).normalize().toLowerCase().includes(wanted));
  return html`
    <div class="filters"><${Input} label=${label} type="search" required=${false} value=${text} onInput=${setText} /></div>
    ${found.length === 0 ? html`<p class="quiet" role="status">None of ${count(rows.length, 'line')} contains this text.</p>` : children(found.slice(0, most))}
    ${found.length > most && html`<p class="hint">${count(most, 'line')} of ${count(found.length, 'line')} are shown. Enter a part of a name to see others.</p>`}`;
}
