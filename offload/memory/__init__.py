"""Where keys and values lie: formats of pages, tiers, links and what is read ahead."""
