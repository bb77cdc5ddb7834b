// Begins dist with what other parts of the repository own: the dashboard's code that verifies and seals, and the list of
// what it uses of the packages.
import {copyFile, cp, mkdir, rm} from 'node:fs/promises';

const here = new URL('../', import.meta.url), root = new URL('../../', here);
const dist = new URL('dist/', here);

await rm(dist, {recursive: true, force: true});
await mkdir(new URL('vendor/', dist), {recursive: true});
await cp(new URL('server/dashboard/static/crypto/', root), new URL('crypto/', dist), {recursive: true});
await copyFile(new URL('hack/web/noble.js', root), new URL('vendor/noble.js', dist));
await copyFile(new URL('LICENSE', root), new URL('LICENSE', dist));
