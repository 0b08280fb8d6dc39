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
		{"not on the list of its tag", "acme", "ZREM tagged:acme:a=1 many", "registry many"},
		{"the last group not on the list of its tag", "acme", "DEL tagged:acme:b=2", "registry, registry many"},
		{"its tag is not among the tenant's", "acme", "SREM tags:acme b=2", "registry many"},
		{"unknown group on the list of a tag", "acme", "ZADD tagged:acme:a=1 1 nosuch", "registry nosuch"},
		{"on the list of a tag that it does not have", "acme", "ZADD tagged:acme:b=2 1 moved", "registry moved"},
		{"tag that no group has", "acme", "SADD tags:acme z=1", "registry"},
		{"callback in no queue", "acme", "ZREM callbacks:due:acme x.1.running; ZREM callbacks:age:acme x.1.running", "callbacks"},
		{"callback in one set of its queue", "acme", "ZREM callbacks:age:acme x.1.running", "callbacks"},
		{"callback in the other set of its queue", "acme", "ZREM callbacks:due:acme x.1.running", "callbacks"},
		{"callback in the queue of another endpoint", "acme", "ZADD callbacks:due:globex 5 x.1.running; ZADD callbacks 5 globex", "callbacks"},
		{"the only callback in no queue", "acme", "DEL callbacks:due:acme|https://a.example:444; DEL callbacks:age:acme|https://a.example:444", "callbacks"},
		{"callback without data", "acme", "DEL callback:x.1.running", "callbacks"},
		{"dead callback in a queue", "acme", "HSET callback:x.1.running state dead", "callbacks"},
		{"dead callback without data", "acme", "DEL callback:x.1.completed", "callbacks"},
		{"dead callback with a body", "acme", "HSET callback:x.1.completed body x size 1", "callbacks"},
		{"dead callback not among the dead", "acme", "ZREM callbacks:dead x.1.completed", "callbacks"},
		{"pending callback among the dead", "acme", "ZADD callbacks:dead 1 x.1.running", "callbacks"},
		{"queue of callbacks not among the queues", "acme", "ZREM callbacks acme", "callbacks"},
		{"queue of callbacks with another time", "acme", "ZADD callbacks 9000000000000 acme", "callbacks"},
		{"queue of callbacks with other bytes", "acme", "HINCRBY callbacks:bytes acme 5", "callbacks"},
		{"empty queue of callbacks", "acme", "ZADD callbacks 1 nosuch", "callbacks"},
		{"empty queue of callbacks with bytes", "acme", "HSET callbacks:bytes nosuch 5", "callbacks"},
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
