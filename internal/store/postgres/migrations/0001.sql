-- The rows. Keys compare bytewise. Values are encrypted, so that compressing them is lost time, and most fit into a page, where one read finds
-- them. Dead rows are removed early: deleted ones are to be gone soon.
CREATE TABLE latticekeep_kv (
    key bytea PRIMARY KEY,
    value bytea NOT NULL
) WITH (
    toast_tuple_target = 8160,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.1,
    autovacuum_analyze_scale_factor = 0.1
);
ALTER TABLE latticekeep_kv ALTER COLUMN value SET STORAGE EXTERNAL;

-- The head: whoever holds the lock on this row is the one writer. Each commit raises the fence and leaves its id: a database that was put back
-- and written to since comes to the same fence, and not to the same id.
CREATE TABLE latticekeep_head (
    id smallint PRIMARY KEY CHECK (id = 1),
    fence bigint NOT NULL,
    commit_id bytea NOT NULL
) WITH (fillfactor = 10);
INSERT INTO latticekeep_head VALUES (1, 1, '');

-- The ids of the newest commits, a ring: by them a replica that lost the answer to its COMMIT finds out.
CREATE TABLE latticekeep_commit (
    slot integer PRIMARY KEY,
    fence bigint NOT NULL,
    id bytea NOT NULL
) WITH (fillfactor = 50);
