// Icons, drawn for the dashboard on a grid of 16: they say nothing that the text beside them does not.
import {html} from '../vendor/preact.js';

const paths = {
  folder: 'M1.5 4.5v8h13v-7h-6.500l-1.500-2h-5z',
  copy: 'M5.500 5.500h8v8h-8zM10.500 5.500v-3h-8v8h3',
  done: 'M3 8.500l3.500 3.500L13 4.500',
};

export const Icon = ({name}) => html`<svg class="icon" viewBox="0 0 16 16" aria-hidden="true"><path d=${paths[name]} /></svg>`;
