// The colours: those of the system, or light or dark. The choice is the one thing that the dashboard keeps in the
// browser, and a choice of the system's colours keeps nothing.
import {html, useState} from '../vendor/preact.js';
import {Icon} from './icons.js';

const themes = {'': ['Monitor', 'Colours of the system'], light: ['Sun', 'Light colours'], dark: ['Moon', 'Dark colours']};
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

const apply = theme => { document.documentElement.dataset.theme = theme; };

export const applyKept = () => apply(kept());

export function Themes() {
  const [chosen, setChosen] = useState(kept);
  const choose = theme => () => {
    keep(theme);
    apply(theme);
    setChosen(theme);
  };
  return html`<div class="themes" role="group" aria-label="Colours">${Object.entries(themes).map(([theme, [icon, text]]) => html`
    <button key=${theme} type="button" aria-pressed=${chosen === theme} aria-label=${text} title=${text} onClick=${choose(theme)}><${Icon} name=${icon} /></button>`)}</div>`;
}
