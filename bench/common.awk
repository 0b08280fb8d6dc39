# Keeps the benchmarks that two outputs of `go test -bench` have in common. A benchmark that has
# moved to another package is kept, too, and gets its new package in both outputs.
#   awk -f common.awk OLD NEW OLD NEW
# The files are read twice; the result is written to OLD.common and NEW.common.

FNR == 1 { pass++ }

# After the first reading: a benchmark has moved if its name is left over once in each output.
FNR == 1 && pass == 3 {
	for (key in all) {
		split(key, part, SUBSEP)
		inOld = (1 SUBSEP key) in seen
		inNew = (2 SUBSEP key) in seen
		if (inOld && !inNew) onlyOld[part[2]]++
		if (inNew && !inOld) { onlyNew[part[2]]++; movedTo[part[2]] = part[1] }
	}
}

$1 == "pkg:" { pkg = $2; next }

!/^Benchmark/ {
	if (pass > 2 && /^(goos|goarch|cpu):/) print > (FILENAME ".common")
	next
}

pass <= 2 {
	all[pkg, $1] = 1
	seen[pass, pkg, $1] = 1
	next
}

{
	other = pass == 3 ? 2 : 1
	to = pkg
	if (!((other SUBSEP pkg SUBSEP $1) in seen)) {
		if (onlyOld[$1] != 1 || onlyNew[$1] != 1) next
		to = movedTo[$1]
	}
	print "pkg: " to > (FILENAME ".common")
	print > (FILENAME ".common")
}
