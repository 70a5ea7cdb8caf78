  // On paper: as metal/summarise.metal; a warp for each 32 keys.
  paged_kv::summarise(pages, place);
