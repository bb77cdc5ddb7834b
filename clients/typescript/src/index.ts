import type {components as first} from './generated/v1.js';
import type {components as second} from './generated/v2.js';

export {Client, type Answer, type AuditEntry, type Calls, type Options, type V1, type V2} from './client.js';
export {LatticekeepError} from './error.js';

/** The schemas of version 1, such as `SchemasV1['Key']`. */
export type SchemasV1 = first['schemas'];
/** The schemas of version 2, such as `SchemasV2['AuditEntry']`. */
export type SchemasV2 = second['schemas'];
