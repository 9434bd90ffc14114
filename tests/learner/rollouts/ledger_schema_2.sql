CREATE TABLE groups (
    group_id TEXT PRIMARY KEY,
    slot INTEGER NOT NULL CHECK (slot >= 0),
    attempt INTEGER NOT NULL CHECK (attempt >= 0),
    position INTEGER NOT NULL CHECK (position >= slot),
    epoch INTEGER NOT NULL,
    prompt_id INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('admitted', 'received', 'scored', 'consumed', 'dropped')),
    reason TEXT,
    admitted_version INTEGER NOT NULL,
    oldest_version INTEGER,
    step INTEGER,
    staleness INTEGER,
    num_tokens INTEGER,
    reward_mean REAL,
    rewards TEXT,
    admitted_at REAL NOT NULL,
    received_at REAL,
    scored_at REAL,
    consumed_at REAL,
    payload BLOB
) STRICT;
CREATE INDEX groups_by_state ON groups (state, step);
CREATE INDEX groups_by_slot ON groups (slot);
-- The file itself refuses a second live group of a slot, so none can be consumed twice.
CREATE UNIQUE INDEX one_live_group_per_slot ON groups (slot) WHERE state != 'dropped';
CREATE INDEX IF NOT EXISTS payloads_kept ON groups (step) WHERE state = 'consumed' AND payload IS NOT NULL;
PRAGMA user_version = 2;
