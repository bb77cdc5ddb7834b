// Secret values on the screen: covered until each is shown, and forgotten after a while.
import {html, useCallback, useEffect, useRef, useState} from '../vendor/preact.js';
import {fromBase64} from '../crypto/bytes.js';
import {count, visible} from './format.js';
import {Copy, save, say} from './ui.js';

const seconds = 30;

// useBriefly keeps something for 30 seconds and no longer, nor when the page is left:
// {value, left, keep(value), forget()}, left being how many seconds there are still.
// It goes by two clocks, since one can be set back and the other may stand still while
// the computer sleeps.
export function useBriefly() {
  const [held, setHeld] = useState(null);
  const [, tick] = useState(0);
  const forget = useCallback(() => setHeld(null), []);
  const keep = useCallback(value => setHeld({value, date: Date.now(), clock: performance.now()}), []);
  const left = held ? Math.ceil(seconds - Math.max(Date.now() - held.date, performance.now() - held.clock) / 1000) : 0;
  useEffect(() => {
    if (!held) return;
    const look = () => {
      if (Math.max(Date.now() - held.date, performance.now() - held.clock) < seconds * 1000) return tick(n => n + 1);
      forget();
      say('The values are hidden again');
    };
    const timer = setInterval(look, 500);
    document.addEventListener('visibilitychange', look); // timers are late in pages that are not seen
    addEventListener('pagehide', forget); // also when the browser keeps the page to come back to
    return () => {
      clearInterval(timer);
      document.removeEventListener('visibilitychange', look);
      removeEventListener('pagehide', forget);
    };
  }, [held]);
  return {value: left > 0 ? held.value : undefined, left, keep, forget};
}

// Brief shows what a useBriefly keeps, by children(value), with the time that is left
// and a button that does not wait for it. fetch is what is there before and afterwards.
// The focus that was on the values goes to the first button of the panel when they go.
export function Brief({of, fetch = '', children}) {
  const box = useRef(), open = of.value !== undefined, was = useRef(false);
  useEffect(() => {
    if (was.current !== open && (!document.activeElement || document.activeElement === document.body)) {
      (open ? box.current.querySelector('[data-values]') : box.current.closest('.panel')?.querySelector('button'))?.focus({preventScroll: true});
    }
    was.current = open;
  }, [open]);
  return html`<div class="stack" ref=${box}>${!open ? fetch : html`
    <div class="row between">
      <p role="timer"><strong>${count(of.left, 'second')}</strong> until the page forgets this</p>
      <button type="button" onClick=${of.forget}>Hide now</button>
    </div>
    <div data-values tabindex="-1" role="group" aria-label="Values, covered until you show them">${children(of.value)}</div>`}</div>`;
}

// What cannot be seen is written out, line by line, so that nobody takes one value for
// another; copying takes the value as it is.
const Lines = ({text}) => text.split('\n').map((line, i) => html`${i > 0 && '\n'}<bdi key=${i}>${visible(line)}</bdi>`);

// Secret is one value under its name: text, or bytes as base64 when binary is set.
export function Secret({name, value, binary = false}) {
  const [shown, setShown] = useState(false);
  const bytes = binary ? fromBase64(value) : null;
  return html`<div class="value" role="group" aria-label=${name}>
    <div><code>${name}</code>${bytes && html` <span class="quiet">${count(bytes.length, 'byte')} that are no text, in base64</span>`}</div>
    ${shown ? html`<code class="secret" data-testid="secret" tabindex="0">${value === '' ? html`<span class="quiet">(empty)</span>` : html`<${Lines} text=${value} />`}</code>`
      : html`<span class="cover"><span aria-hidden="true">••••••••••••</span><span class="unseen">covered</span></span>`}
    <div class="actions">
      <button type="button" aria-label=${`${shown ? 'Hide' : 'Show'} ${name}`} onClick=${() => setShown(!shown)}>${shown ? 'Hide' : 'Show'}</button>
      <${Copy} text=${value} label="Copy without showing" done=${`Copied ${name}. The clipboard keeps it until something else is copied.`} />
      ${bytes && html`<button type="button" aria-label=${'Download ' + name} onClick=${() => save(name, bytes, 'application/octet-stream')}>Download</button>`}
    </div>
    ${shown && visible(value.replaceAll('\n', '')) !== value.replaceAll('\n', '') && html`<p class="hint">Characters that cannot be seen are written as ⟨U+…⟩ here. Copying takes the value as it is.</p>`}
  </div>`;
}
