"""The controller: ingest, store, query."""
