"""The Mooncake store: the client and its guards, the settings of a cluster, and a store of one node's own."""
