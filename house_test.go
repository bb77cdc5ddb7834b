package main_test

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// What a newcomer can hold in mind. docs/contributing says more.
const (
	maxLines       = 3000 // lines a package, tests and generated files not counted
	maxFiles       = 15   // files a package, counted in the same way
	maxMethods     = 40   // methods a type
	maxMethodFiles = 6    // files that the methods of a type stand in
	maxFields      = 15   // fields a struct
	maxBack        = 10   // percent of a package's file arrows that run back
)

// exceptions maps what is larger than a limit, a package or package.Type, to the reason.
var exceptions = map[string]string{
	"api/client.V2":                    "one method for each operation of the interface",
	"internal/audit":                   "one file for each part of the signed formats, which refer to each other",
	"test/audittest.Fixture":           "one method for each thing that tests do to a log",
	"internal/audit.Entry":             "one field for each field of the signed format in docs/formats.md",
	"internal/audit/verify.Report":     "one field for each fact that a verification prints",
	"internal/config.Config":           "one field for each section of the configuration",
	"test/kmstest.Server":              "one server stands for three services, and each of its faults is a switch",
	"server/v2.Services":               "one service for each resource of the interface",
	"internal/app.service":             "the process holds every service once",
	"internal/identity":                "accounts, sessions, API keys and members share the rows of a user and their MAC",
	"internal/store/postgres":          "one connection holds the head, and all that talks to the server shares the invariants of a commit",
	"internal/store/bolt":              "one goroutine owns the file, and all that touches the file shares the invariants of a commit",
	"internal/compliance/report.sheet": "one method for each kind of block on a page",
}

// TestHouse compares every package and type with the limits.
func TestHouse(t *testing.T) {
	used := map[string]bool{}
	exceeds := func(what, format string, args ...any) {
		if _, ok := exceptions[what]; ok {
			used[what] = true
			return
		}
		t.Errorf("%s: "+format+": split it by who owns the state, or enter it in exceptions with the reason", append([]any{what}, args...)...)
	}
	for _, p := range readHouse(t) {
		if p.lines > maxLines {
			exceeds(p.dir, "%d lines, at most %d", p.lines, maxLines)
		}
		if len(p.files) > maxFiles {
			exceeds(p.dir, "%d files, at most %d", len(p.files), maxFiles)
		}
		if back, all := p.backArrows(); 100*len(back) > maxBack*all {
			exceeds(p.dir, "%d of %d arrows between files run back, at most %d %%: %s", len(back), all, maxBack, strings.Join(back, ", "))
		}
		for _, name := range slices.Sorted(maps.Keys(p.types)) {
			ty, what := p.types[name], p.dir+"."+name
			if ty.methods > maxMethods {
				exceeds(what, "%d methods, at most %d", ty.methods, maxMethods)
			}
			if len(ty.methodFiles) > maxMethodFiles {
				exceeds(what, "methods in %d files, at most %d", len(ty.methodFiles), maxMethodFiles)
			}
			if ty.fields > maxFields {
				exceeds(what, "%d fields, at most %d", ty.fields, maxFields)
			}
		}
	}
	for what := range exceptions {
		if !used[what] {
			t.Errorf("%s is within the limits: delete its exception", what)
		}
	}
}

// A room is a package as a reader of its files sees it.
type room struct {
	dir   string
	lines int
	files []string
	types map[string]*typeSize
	uses  map[[2]string]map[string]bool // names by arrow: the first file uses these declarations of the second
}

type typeSize struct {
	methods, fields int
	methodFiles     map[string]bool
}

// TestHouseLogsCallErrorsError finds the attribute "err", which libraries use: operators search for one
// key, and internal/logs renames theirs.
func TestHouseLogsCallErrorsError(t *testing.T) {
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || path == "internal/logs/logs.go" {
			return err
		}
		b, err := os.ReadFile(path)
		for i, line := range strings.Split(string(b), "\n") {
			if strings.Contains(line, `"err"`) {
				t.Errorf(`%s:%d: the attribute of an error in the log is "error"`, path, i+1)
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// readHouse reads the hand-written files of every package of this module. It resolves names inside a package only, so
// it needs no compiled import and takes about a second.
func readHouse(t *testing.T) []*room {
	t.Helper()
	dirs := map[string][]string{}
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != ".":
			_, err := os.Stat(filepath.Join(path, "go.mod"))
			if name := d.Name(); err == nil || strings.HasPrefix(name, ".") || name == "testdata" || name == "bin" || name == "node_modules" {
				return fs.SkipDir
			}
		case strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go"):
			dirs[filepath.Dir(path)] = append(dirs[filepath.Dir(path)], path)
		}
		return nil
	})
	if err != nil {
		t.Fatalf("looking for packages: %v", err)
	}
	var rooms []*room
	for _, dir := range slices.Sorted(maps.Keys(dirs)) {
		rooms = append(rooms, readRoom(t, dir, dirs[dir]))
	}
	return rooms
}

func readRoom(t *testing.T, dir string, paths []string) *room {
	t.Helper()
	p := &room{dir: filepath.ToSlash(dir), types: map[string]*typeSize{}, uses: map[[2]string]map[string]bool{}}
	fset := token.NewFileSet()
	var files []*ast.File
	for _, path := range paths {
		file, err := parser.ParseFile(fset, path, nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			t.Fatalf("reading %s: %v", path, err)
		}
		if ast.IsGenerated(file) {
			continue
		}
		files = append(files, file)
		p.files = append(p.files, filepath.Base(path))
		p.lines += fset.File(file.Pos()).LineCount()
		p.measureTypes(filepath.Base(path), file)
	}
	info := types.Info{Uses: map[*ast.Ident]types.Object{}}
	config := types.Config{
		Importer: noImports{}, Error: func(error) {}, // names of other packages stay unresolved
	}
	pkg, _ := config.Check(dir, fset, files, &info)
	for ident, object := range info.Uses {
		if object.Pkg() != pkg || pkg == nil || !declaredByFile(object, pkg) {
			continue
		}
		from, to := fset.Position(ident.Pos()), fset.Position(object.Pos())
		if from.Filename != to.Filename {
			arrow := [2]string{filepath.Base(from.Filename), filepath.Base(to.Filename)}
			if p.uses[arrow] == nil {
				p.uses[arrow] = map[string]bool{}
			}
			p.uses[arrow][object.Name()] = true
		}
	}
	return p
}

type noImports struct{}

func (noImports) Import(string) (*types.Package, error) { return nil, errors.New("not imported") }

// declaredByFile reports whether an object is a declaration of the package or a method, not a field or a local.
func declaredByFile(object types.Object, pkg *types.Package) bool {
	if f, ok := object.(*types.Func); ok && f.Signature().Recv() != nil {
		return true
	}
	return object.Parent() == pkg.Scope()
}

func (p *room) measureTypes(file string, f *ast.File) {
	size := func(name string) *typeSize {
		if p.types[name] == nil {
			p.types[name] = &typeSize{methodFiles: map[string]bool{}}
		}
		return p.types[name]
	}
	for _, decl := range f.Decls {
		switch d := decl.(type) {
		case *ast.FuncDecl:
			if name := receiver(d); name != "" {
				s := size(name)
				s.methods++
				s.methodFiles[file] = true
			}
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				ty, ok := spec.(*ast.TypeSpec)
				if !ok {
					continue
				}
				if s, ok := ty.Type.(*ast.StructType); ok {
					size(ty.Name.Name).fields = s.Fields.NumFields()
				}
			}
		}
	}
}

func receiver(d *ast.FuncDecl) string {
	if d.Recv == nil {
		return ""
	}
	expr := d.Recv.List[0].Type
	for {
		switch e := expr.(type) {
		case *ast.StarExpr:
			expr = e.X
		case *ast.IndexExpr:
			expr = e.X
		case *ast.IndexListExpr:
			expr = e.X
		case *ast.Ident:
			return e.Name
		default:
			return ""
		}
	}
}

// backArrows returns the arrows between files that run against the best order of the files that was found, and how
// many arrows there are. In a package that reads from the top there are none.
func (p *room) backArrows() (back []string, all int) {
	order := slices.Clone(p.files)
	cost := func(order []string) (n int) {
		at := map[string]int{}
		for i, f := range order {
			at[f] = i
		}
		for arrow := range p.uses {
			if at[arrow[0]] > at[arrow[1]] {
				n++
			}
		}
		return n
	}
	for best := cost(order); ; { // move one file at a time to where it helps most
		improved := false
		for _, file := range p.files {
			i := slices.Index(order, file)
			rest := slices.Delete(slices.Clone(order), i, i+1)
			for j := range order {
				if moved := slices.Insert(slices.Clone(rest), j, file); cost(moved) < best {
					order, best, improved = moved, cost(moved), true
				}
			}
		}
		if !improved {
			break
		}
	}
	for arrow := range p.uses {
		if slices.Index(order, arrow[0]) > slices.Index(order, arrow[1]) {
			back = append(back, fmt.Sprintf("%s → %s (%s)", arrow[0], arrow[1], strings.Join(slices.Sorted(maps.Keys(p.uses[arrow])), " ")))
		}
	}
	slices.Sort(back)
	return back, len(p.uses)
}
