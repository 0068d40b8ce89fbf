"""The data model, in collector.proto, and what is generated from it."""
