// Icons say nothing that the text beside them does not.
import {h, html} from '../vendor/preact.js';
import * as icons from '../vendor/icons.js';

// Icon draws one by its name in vendor/icons.js.
export const Icon = ({name}) => html`<svg class="icon" viewBox="0 0 24 24" aria-hidden="true">${icons[name].map(([tag, attributes], i) => h(tag, {...attributes, key: i}))}</svg>`;
