"""Write data sets: as shards, as records, and as local copies."""
