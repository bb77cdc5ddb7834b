// The colours: those of the system, or light or dark. The choice is the one thing that the dashboard keeps in the
// browser, and a choice of the system's colours keeps nothing.
import {html, useEffect, useState} from '../vendor/preact.js';
import {Icon} from './icons.js';

export const themes = {'': ['Monitor', 'Colours of the system'], light: ['Sun', 'Light colours'], dark: ['Moon', 'Dark colours']};
const key = 'theme';

const kept = () => {
  try {
    return Object.hasOwn(themes, localStorage.getItem(key) ?? '') ? localStorage.getItem(key) ?? '' : '';
  } catch {
    return ''; // a browser that keeps nothing
  }
};

function keep(theme) {
  try {
    if (theme) localStorage.setItem(key, theme);
    else localStorage.removeItem(key);
  } catch { /* then it lasts as long as the page */ }
}

const changed = new EventTarget();

const apply = theme => { document.documentElement.dataset.theme = theme; };

export const applyKept = () => apply(kept());

export function chooseTheme(theme) {
  keep(theme);
  apply(theme);
  changed.dispatchEvent(new Event('change'));
}

export function Themes() {
  const [chosen, setChosen] = useState(kept);
  useEffect(() => {
    const update = () => setChosen(document.documentElement.dataset.theme);
    changed.addEventListener('change', update);
    return () => changed.removeEventListener('change', update);
  }, []);
  return html`<div class="themes" role="group" aria-label="Colours">${Object.entries(themes).map(([theme, [icon, text]]) => html`
    <button key=${theme} type="button" aria-pressed=${chosen === theme} aria-label=${text} title=${text} onClick=${() => chooseTheme(theme)}><${Icon} name=${icon} /></button>`)}</div>`;
}
