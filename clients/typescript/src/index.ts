export {Client, type Answer, type AuditEntry, type Calls, type Options, type V1, type V2} from './client.js';
export {LatticekeepError} from './error.js';
export type {Input, BodyOf} from './contract.js';
export type {components as v1, operations as v1Operations} from './generated/v1.js';
export type {components as v2, operations as v2Operations} from './generated/v2.js';
