package audittest

import "strings"

// tampersOfLists are tampers with the lists by which groups, their tenants and their jobs are found.
// Each command names a key of the tenant's partition without its base.
var tampersOfLists = func() (all []Tamper) {
	for _, c := range []struct{ name, tenant, commands, want string }{
		{"on no list of groups", "acme", "ZREM groups many; ZREM open many; ZREM groups:acme many", "lifecycle many, registry many"},
		{"only on its tenant's list", "globex", "ZREM groups completed; ZREM ended completed",
			"lifecycle completed, registry completed"},
		{"on no list, and its counts are wrong", "initech",
			"ZREM groups partly; ZREM ended partly; ZREM groups:initech partly; ZREM tenants initech; HINCRBY group:partly done 5",
			"conservation partly, lifecycle partly, registry partly, states partly"},
		{"not on the list of all groups", "globex", "ZREM groups empty", "registry empty"},
		{"tenant not on the list of tenants", "umbrella", "ZREM tenants umbrella", "registry limited"},
		{"unknown group on the lists of groups", "globex", "ZADD open 1 nosuch; ZADD ended 1 nosuch; ZADD failed 1 nosuch; " +
			"ZADD scheduled 9000000000000 nosuch; ZADD groups:globex 1 nosuch", "registry nosuch"},
		{"group of another tenant on a list", "acme", "ZADD groups:other 1 many; ZADD tenants 0 other", "registry many"},
		{"waiting jobs, but not in the fair queue", "acme", "ZREM fair:many:normal:acme many", "registry many"},
		{"waiting jobs, but its tenant is in no lane", "acme", "ZREM fair:many:normal acme", "registry many"},
		{"scheduled, but not on the list", "globex", "ZREM scheduled scheduled", "registry scheduled"},
		{"failures of a cancelled group not reduced, and it is not dirty", "hooli", "HSET group:cancelled reduce_failures 1; SREM dirty cancelled",
			"lifecycle cancelled"},
		{"tenant with non-ready jobs not on the list", "acme", "ZREM non-ready acme", "registry"},
	} {
		all = append(all, Tamper{c.name, func(w *World) []string {
			for command := range strings.SplitSeq(c.commands, "; ") {
				args := []any{}
				for _, word := range strings.Fields(command) {
					args = append(args, word)
				}
				args[1] = w.Space.OfTenant(c.tenant).Base() + args[1].(string)
				w.OK(w.C.Do(w.Context(), args...).Err())
			}
			return strings.Split(c.want, ", ")
		}})
	}
	return all
}()
