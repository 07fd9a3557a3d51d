"""The tables of the index."""

from typing import Final

INDEX_VERSION: Final = 1

SCHEMA: Final = """
CREATE TABLE nodes (
    sequence INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    session TEXT NOT NULL,
    parent TEXT REFERENCES nodes(id),
    kind TEXT NOT NULL,
    position INTEGER NOT NULL,
    turn INTEGER NOT NULL,
    label TEXT NOT NULL,
    namespace TEXT NOT NULL,
    created_s REAL NOT NULL,
    inexact INTEGER NOT NULL,
    chain TEXT NOT NULL,
    file_bytes INTEGER NOT NULL);
CREATE INDEX nodes_session ON nodes(session, sequence);
CREATE INDEX nodes_parent ON nodes(parent);
CREATE TABLE snapshots (
    number INTEGER PRIMARY KEY,
    node TEXT NOT NULL UNIQUE REFERENCES nodes(id),
    manifest TEXT NOT NULL,
    position INTEGER NOT NULL,
    raw_bytes INTEGER NOT NULL,
    reason TEXT NOT NULL,
    lossy INTEGER NOT NULL,
    created_s REAL NOT NULL,
    used_s REAL NOT NULL,
    file_bytes INTEGER NOT NULL,
    set_aside TEXT);
CREATE TABLE parts (
    number INTEGER PRIMARY KEY,
    hash TEXT NOT NULL UNIQUE,
    raw_bytes INTEGER NOT NULL,
    file_bytes INTEGER NOT NULL,
    base TEXT,
    damaged INTEGER NOT NULL DEFAULT 0);
CREATE INDEX parts_damaged ON parts(damaged) WHERE damaged;
CREATE TABLE uses (
    snapshot INTEGER NOT NULL REFERENCES snapshots(number) ON DELETE CASCADE,
    part INTEGER NOT NULL REFERENCES parts(number),
    PRIMARY KEY (snapshot, part)) WITHOUT ROWID;
CREATE INDEX uses_part ON uses(part);
CREATE TABLE tags (
    tag TEXT PRIMARY KEY,
    node TEXT NOT NULL REFERENCES nodes(id),
    file TEXT NOT NULL,
    file_bytes INTEGER NOT NULL);
CREATE TABLE erasures (kind TEXT NOT NULL, name TEXT NOT NULL, PRIMARY KEY (kind, name));
"""
