// Package audit defines the log of a deployment: one hash chain, whose entries contain the hash of
// the entry before them and are signed with ML-DSA-65. It has the formats (entries, groups, rows,
// summaries, tree, checkpoints, segments, bases) and the state that replaying entries gives; it
// opens no transaction of its own.
//
// Packages below it work on the log. Package [entries] reads the rows of entries. In [chain], a
// [chain.Chain] reads the log from the store. In [writer], a [writer.Log] takes entries: an event joins the transaction of the change that it
// records ([writer.Log.Append]), so neither is ever committed without the other. The store decides
// the order when it commits: the hook [writer.Log.Commit] gives each event its sequence and time,
// links it and signs it. A [guard.Guard] authorizes and records on behalf of services, a
// [reader.Reader] answers questions, [verify] checks all of it, and [keeper] anchors and archives
// it.
//
// A chain shows that nothing inside it was changed, dropped or moved. Alone it does not show that
// its tail was cut, or that the holder of the key rewrote it. That takes a [Checkpoint] kept
// elsewhere: it states the head and the root of a tree over all entries, so that a later checkpoint
// can be proven to contain it. A log that is behind a checkpoint takes no entries
// ([writer.Log.Halt]) until the loss is accepted ([guard.Guard.AcceptRollback]). It then continues
// in a new epoch, above the lost sequences. Sequences are consecutive within an epoch.
//
// # Several writers
//
// Many processes may write one log, each with a [writer.Log] of its own and the same key. The store
// runs their hooks one after the other, and that is the order of the chain. A hook that finds a
// head written by another process continues from it if two conditions are met: the head is signed
// with the log's key, and the log still has the newest entry that this process has seen. Otherwise
// the process signs nothing and takes no entries until the loss is accepted, by any process.
//
// What a process remembers is either compared with the store in the same transaction or used only
// as a bound. The process reads the heads of tenants again after another process has written, and
// never continues from a head that is older or unsigned. The first process to derive, keep or
// archive something writes it, after it has compared its input in the same transaction. Each
// process verifies the log by itself, counts its own writes, and limits how often it records
// refusals.
package audit
