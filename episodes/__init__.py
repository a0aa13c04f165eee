"""What a rollout is, in memory and on disk: types, the zarr store, import and export."""
