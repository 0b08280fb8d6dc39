package main

// mutants has changes of the code, each of which breaks a promise of README.md or
// docs/reliability.md.
var mutants = []mutant{
	{
		name: "attempt-fence", promise: "the report of a lost attempt counts while another attempt runs",
		file: "lua/jobs/outcome.lua",
		edits: []edit{
			{"transition(group, ranges, 'I', 'D')", "transition(group, ranges, 'I', 'D', true)"},
			{"mine = live and states[i] == 'I' .. m\n", "mine = live and string.sub(states[i], 1, 1) == 'I'\n"},
			{
				"(state == (kind == 'u' and 'R' or 'I') .. m or kind == 'd' and state == 'R' .. m)\n",
				"string.sub(state, 1, 1) == (kind == 'u' and 'R' or 'I')\n",
			},
		},
		pkg: "./tests/integration", test: "TestLateOutcomesAreRefused",
	},
	{
		name: "retry-limit", promise: "a job is retried once more than its group allows",
		file:  "internal/jobs/worker/run.go",
		edits: []edit{{"retries < r.MaxRetries:", "retries <= r.MaxRetries:"}},
		pkg:   "./tests/integration", test: "TestRetryRunsOnlyWhatFailed",
	},
	{
		name: "repeated-write", promise: "the Redis client repeats a command whose reply was lost",
		file:  "internal/redisx/connect.go",
		edits: []edit{{"MaxRetries:            -1,", "MaxRetries:            3,"}},
		pkg:   "./internal/redisx", test: "TestLostReplyIsNotRetried",
	},
	{
		name: "ack-in-script", promise: "a job's outcome is stored, but its entry stays in the ready stream",
		file: "lua/jobs/outcome.lua",
		edits: []edit{
			{"  call('XACK', stream, 'workers', unpack(entries, from, to))\n", ""},
			{"  call('XDEL', stream, unpack(entries, from, to))\n", ""},
		},
		pkg: "./internal/jobs/ledger", test: "TestOutcomeDone",
	},
	{
		name: "reduce-once", promise: "a result that is reduced twice counts twice",
		file:  "lua/jobs/reduce.lua",
		edits: []edit{{"if string.sub(states[i], 1, 1) == 'D' then", "if string.find(states[i], '^[DA]') then"}},
		pkg:   "./internal/jobs/ledger", test: "TestReduceWhatIsNotDone",
	},
	{
		name: "cancel-wins", promise: "the outcome of a job changes the counts of its cancelled group",
		file:  "lua/jobs/outcome.lua",
		edits: []edit{{"local live, tenant = g[1] and g[2] ~= 'CANCELLED', g[1]", "local live, tenant = g[1], g[1]"}},
		pkg:   "./internal/jobs/ledger", test: "TestOutcomeStale",
	},
	{
		name: "limit", promise: "a window has one permit too many",
		file:  "lua/parts/limiters.lua",
		edits: []edit{{"return permits - n, (at + WIDTH) * 1000", "return permits + 1 - n, (at + WIDTH) * 1000"}},
		pkg:   "./internal/jobs/ledger", test: "TestLimiters",
	},
	{
		name: "lost-once", promise: "a job that has moved since it was missed ends as lost",
		file:  "lua/jobs/lose.lua",
		edits: []edit{{"states[i] == missed[i] and ", "states[i] ~= '' and "}},
		pkg:   "./internal/jobs/ledger", test: "TestLoseOnlyWhatHasNotMoved",
	},
	{
		name: "innocent", promise: "a job that no worker had started becomes a suspect",
		file:  "lua/jobs/reclaim.lua",
		edits: []edit{{"if letter == 'I' then j.losses = j.losses + 1 end", "j.losses = j.losses + 1"}},
		pkg:   "./internal/jobs/ledger", test: "TestReclaim",
	},
	{
		name: "key-role", promise: "a record in Redis gives a key more rights than its token names",
		file:  "internal/access/apikey/authenticator.go",
		edits: []edit{{"if err == nil && p.Role != role {", "if err != nil && p.Role != role {"}},
		pkg:   "./internal/access/apikey", test: "TestRoleIsThatOfTheToken",
	},
	{
		name: "key-revoked", promise: "a revoked key is accepted for longer than ten seconds",
		file: "internal/access/apikey/authenticator.go",
		edits: []edit{
			{"now.Sub(c.readAt) > copyTTL {", "now.Sub(c.readAt) > OutageTTL {"},
			{"	ttl := copyTTL\n", "	ttl := OutageTTL\n"},
		},
		pkg: "./internal/access/apikey", test: "TestRevocation",
	},
	{
		name: "room-order", promise: "a user who has just entered overtakes those who wait",
		file:  "lua/room/enter.lua",
		edits: []edit{{"R.waiting == 0 and free_slots() > 0", "free_slots() > 0"}},
		pkg:   "./internal/room/waitingroom", test: "TestModel",
	},
	{
		name: "room-slots", promise: "more users hold slots than the event has seats left",
		file:  "lua/parts/room.lua",
		edits: []edit{{"math.min(R.capacity, R.stock or R.capacity)", "R.capacity"}},
		pkg:   "./internal/room/waitingroom", test: "TestModel",
	},
	{
		name: "room-pause", promise: "users lose their places while Redis or all brokers stand still",
		file:  "lua/room/expire_users.lua",
		edits: []edit{{"if NOW - last > STOOD_STILL then R.hold = NOW + HOLD end\n", ""}},
		pkg:   "./internal/room/waitingroom", test: "TestModel",
	},
	{
		name: "bound-due", promise: "due jobs of a tenant exceed its bound of jobs in flight",
		file:  "lua/jobs/promote.lua",
		edits: []edit{{"t.free = math.max(0, tonumber(h[8]) - t.places)", "t.free = tonumber(h[8])"}},
		pkg:   "./internal/jobs/ledger", test: "TestBounds",
	},
	{
		name: "bound-cancelled", promise: "the job of a cancelled group holds its place for ever",
		file:  "lua/jobs/reclaim.lua",
		edits: []edit{{"        if g[1] then free_places(g[1], 1) end\n", ""}},
		pkg:   "./internal/jobs/ledger", test: "TestBoundOfATenantWhenAnEntryIsRemoved",
	},
	{
		name: "bound-once", promise: "a report that comes twice frees a place twice",
		file:  "lua/jobs/outcome.lua",
		edits: []edit{{"removed = removed + call('XDEL', stream, unpack(gone))", "removed = removed + #gone"}},
		pkg:   "./internal/jobs/ledger", test: "TestBoundOfATenant",
	},
	{
		name: "tag-left", promise: "a deleted group stays on the lists of its tags",
		file:  "lua/groups/expire.lua",
		edits: []edit{{"  untag(g[1], group, g[5])\n", ""}},
		pkg:   "./internal/jobs/ledger", test: "TestTags",
	},
	{
		name: "quota-late", promise: "a call of a leader that comes late changes quotas again",
		file:  "lua/tenants/quota.lua",
		edits: []edit{{"if at > fence or at == fence and tonumber(h[2] or 0) > step then", "if at > fence then"}},
		pkg:   "./internal/jobs/ledger", test: "TestQuota",
	},
	{
		name: "lower-first", promise: "partitions get more of a limit before all others have given it up",
		file:  "internal/jobs/fetcher/leader.go",
		edits: []edit{{"	if failed != nil {\n		return nil, false, failed\n	}\n	c.terms.Wake", "	c.terms.Wake"}},
		pkg:   "./internal/jobs/fetcher", test: "TestLeaderCarriesOutChanges",
	},
	{
		name: "law-places", promise: "the audit does not see that a tenant's places are miscounted",
		file:  "internal/audit/counters.go",
		edits: []edit{{"have != want && !uncertain[name]", "have < want && !uncertain[name]"}},
		pkg:   "./internal/audit/repair", test: "TestTampering",
	},
}
